"""The receiving process of the demo: frames in, text or digests out, one JSON object a line on stdout.

Run as a process of its own by `receiver_process.py`. Events: `{"endpoint"}` once it is bound;
`{"rid", "text", "done"}` as text arrives; `{"summary"}` when all requests have ended. It goes on
receiving until its standard input is closed: the sender may have a last step in flight.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import select
import sys
from typing import Any

import numpy as np

from gpupack.transport.receiver import Delta, OutputReceiver, ReceivedStep

POLL_MS = 50


def emit(event: dict[str, Any]) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class TextSink:
    """Turns deltas into text, and tells of it as it comes."""

    def __init__(self, tokenizer_path: str) -> None:
        from tokenizers import Tokenizer

        from gpupack.text.detokenizer import Detokenizer

        self._detokenizer = Detokenizer(Tokenizer.from_file(tokenizer_path))
        self.finished = 0

    def push(self, delta: Delta) -> None:
        """Take in one delta."""
        out = self._detokenizer.push(delta)
        done = out.finish_reason is not None
        self.finished += done
        emit({"rid": out.rid, "text": out.text, "reset": out.reset, "done": done, "finish_reason": out.finish_reason})

    def drop(self, rid: str) -> None:
        """Forget a request that ended without a final delta."""
        self._detokenizer.drop(rid)

    def summary(self) -> dict[str, Any]:
        """Nothing beyond the events."""
        return {}


class DigestSink:
    """Hashes the tokens and logprob bits of each request, for a check by content."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[list[int], list[float]]] = {}
        self.digests: dict[str, str] = {}

    def __len__(self) -> int:
        """Requests that are open."""
        return len(self._open)

    @property
    def finished(self) -> int:
        """Requests that have ended."""
        return len(self.digests)

    def push(self, delta: Delta) -> None:
        """Take in one delta."""
        if delta.restarted or delta.rid not in self._open:
            self._open[delta.rid] = ([], [])
        tokens, logprobs = self._open[delta.rid]
        tokens += delta.token_ids
        logprobs += delta.logprobs or []
        if delta.finish_reason is not None:
            self.digests[delta.rid] = content_digest(tokens, logprobs, delta.finish_reason)
            del self._open[delta.rid]

    def drop(self, rid: str) -> None:
        """Forget a request that ended without a final delta."""
        self._open.pop(rid, None)

    def summary(self) -> dict[str, Any]:
        """Digest by rid."""
        return {"digests": self.digests}


def content_digest(tokens: list[int], logprobs: list[float], finish_reason: dict[str, Any]) -> str:
    """SHA-256 over token ids, the bit patterns of the float32 logprobs and the finish reason."""
    content = hashlib.sha256(np.array(tokens, np.int64).tobytes())
    content.update(np.array(logprobs, np.float32).tobytes())
    content.update(json.dumps(finish_reason, sort_keys=True).encode())
    return content.hexdigest()


def take_in(step: ReceivedStep, sink: TextSink | DigestSink) -> int:
    """Pass a step on, first its deltas, then the requests that it drops; the number of deltas."""
    deltas = step.deltas()
    for delta in deltas:
        sink.push(delta)
    for rid in step.dropped:
        sink.drop(rid)
    return len(deltas)


def main() -> None:
    """Receive until standard input is closed, which the end of the parent process does too."""
    parser = argparse.ArgumentParser(description="receiving process of the gpupack demo")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--tokenizer", help="tokenizer.json; without it contents are hashed")
    options = parser.parse_args()
    sink = TextSink(options.tokenizer) if options.tokenizer else DigestSink()
    receiver = OutputReceiver(options.endpoint)
    rows = frames = 0
    try:
        emit({"endpoint": receiver.endpoint})
        told = False
        while True:
            step = receiver.recv(POLL_MS)
            if step is not None:
                frames += 1
                rows += take_in(step, sink)
            elif select.select([sys.stdin], [], [], 0)[0]:
                break
            if sink.finished >= options.requests and not told:
                emit({"summary": {"rows": rows, "frames": frames, "finished": sink.finished, **sink.summary()}})
                told = True
    finally:
        receiver.close()


if __name__ == "__main__":
    main()
