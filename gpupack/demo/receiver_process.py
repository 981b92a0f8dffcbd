"""The parent's side of the receiving process: start it, follow its events, end it."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 60.0


class ReceiverProcess:
    """A receiver in another process, for `requests` requests; a context manager that leaves no process behind.

    With `tokenizer` (a tokenizers.Tokenizer) it turns deltas into text, else it hashes contents.
    """

    def __init__(self, requests: int, tokenizer: Any | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gpupack-")
        folder = Path(self._folder.name)
        command = [sys.executable, "-P", "-m", "gpupack.demo.receive"] if sys.version_info >= (3, 11) else [
            sys.executable, "-m", "gpupack.demo.receive",
        ]  # fmt: skip
        command += ["--endpoint", f"ipc://{folder}/output", "--requests", str(requests)]
        if tokenizer is not None:
            tokenizer.save(str(folder / "tokenizer.json"))
            command += ["--tokenizer", str(folder / "tokenizer.json")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.texts: dict[str, str] = {}
        self.finish_reasons: dict[str, dict[str, Any]] = {}
        self.summary: dict[str, Any] | None = None
        try:
            self.endpoint: str = self._next(START_TIMEOUT_S)["endpoint"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ReceiverProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def events(self) -> list[dict[str, Any]]:
        """Text events that have come since the last call; does not block."""
        news = []
        while not self._events.empty():
            event = self._events.get_nowait()
            self._note(event)
            news.append(event)
        return news

    def finish(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the end of the last request; the receiver's summary. Call it when nothing more is sent."""
        while self.summary is None:
            self._note(self._next(timeout_s))
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout_s)
        return self.summary

    def close(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._folder.cleanup()

    def _note(self, event: dict[str, Any]) -> None:
        if "summary" in event:
            self.summary = event["summary"]
        elif "rid" in event:
            rid = event["rid"]
            self.texts[rid] = ("" if event["reset"] else self.texts.get(rid, "")) + event["text"]
            if event["done"]:
                self.finish_reasons[rid] = event["finish_reason"]

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"the receiving process said nothing for {timeout_s:.0f} s") from None
        if "ended" in event:
            raise RuntimeError(f"the receiving process ended with status {self._process.wait()}")
        return event

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put({"ended": True})
