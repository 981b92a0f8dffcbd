"""Random lives of random tokens, without a model: the whole output path at any batch size, verified by content."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.request import Request
from gpupack.core.row_control import Control
from gpupack.demo.loop import LoopStats
from gpupack.demo.receive import content_digest
from gpupack.streamer.output_streamer import OutputStreamer

VOCAB_SIZE = 32_000
EOS_TOKEN_ID = 2


@dataclass
class _Life:
    """What a request will output, drawn when it is admitted."""

    rid: str
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    with_logprobs: bool
    finish_reason: dict[str, object]
    engine: bool
    taken: int = 0

    @property
    def digest(self) -> str:
        """What the receiver should come to."""
        scores = self.logprobs.tolist() if self.with_logprobs else []
        return content_digest(self.token_ids.tolist(), scores, self.finish_reason)


@dataclass
class SyntheticLoop:
    """`batch` requests at a time, admitted again as they end, for `steps` steps; then all are ended.

    A tenth of them end by an end-of-sequence id, the rest by length; a quarter return logprobs; an
    eighth are judged by the engine, which passes its finish as control.
    """

    streamer: OutputStreamer
    batch: int
    steps: int
    seed: int = 0
    stats: LoopStats = field(default_factory=LoopStats)
    digests: dict[str, str] = field(default_factory=dict)
    output_tokens: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._lives: dict[int, _Life] = {}
        self._total = self.total_requests(self.batch, self.steps)
        self._admitted = 0

    @staticmethod
    def total_requests(batch: int, steps: int) -> int:
        """Requests that are served in all."""
        return batch + steps * max(batch // 64, 1)

    def run(self) -> None:
        """Serve all requests."""
        max_accept = self.streamer.packer.config.max_accept
        control = Control(self.batch)
        self._admit(self.batch)
        while self._lives:
            began = time.perf_counter_ns()
            handles = np.fromiter(self._lives, np.int64, len(self._lives))
            token_ids, logprobs, accept_lens = self._sample(handles, max_accept)
            asked = self._judge(handles, control)
            start = time.perf_counter_ns()
            ticket = self.streamer.packer.step(
                handles, token_ids, accept_lens=accept_lens, logprobs=logprobs, control=asked
            )
            report = self.streamer.send(ticket)
            packing = time.perf_counter_ns() - start
            self.streamer.retire(report.finished)
            for handle in report.finished.tolist():
                del self._lives[handle]
            self._admit(len(report.finished))
            self.stats.count(report, began, packing)

    def _admit(self, count: int) -> None:
        count = min(count, self._total - self._admitted)
        lives = [self._draw(self._admitted + i) for i in range(count)]
        self._admitted += count
        requests = [
            Request(
                life.rid,
                max_new_tokens=len(life.token_ids),
                stream=bool(self._random.random() < 0.9),
                stream_interval=int(self._random.choice((1, 1, 1, 2, 8))),
                judge="engine" if life.engine else "device",
                return_logprob=life.with_logprobs,
            )
            for life in lives
        ]
        handles = self.streamer.admit(requests)
        self._lives |= dict(zip(handles.tolist(), lives, strict=True))

    def _draw(self, number: int) -> _Life:
        random = self._random
        length = int(random.integers(1, max(self.steps, 2)))
        token_ids = random.integers(EOS_TOKEN_ID + 1, VOCAB_SIZE, length)
        reason: dict[str, object] = {"type": "length", "length": length}
        engine = bool(random.random() < 1 / 8)
        if not engine and random.random() < 0.1:
            token_ids[-1] = EOS_TOKEN_ID
            reason = {"type": "stop", "matched": EOS_TOKEN_ID}
        logprobs = -random.random(length, np.float32)
        self.output_tokens += length
        life = _Life(f"request-{number}", token_ids, logprobs, bool(random.random() < 0.25), reason, engine)
        self.digests[life.rid] = life.digest
        return life

    def _sample(
        self, handles: NDArray[np.int64], max_accept: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int32]]:
        """The next run of each request, with tokens behind the accepted ones that must not be sent."""
        batch = len(handles)
        token_ids = self._random.integers(0, VOCAB_SIZE, (batch, max_accept))
        logprobs = np.full((batch, max_accept), np.nan, np.float32)
        accept_lens = self._random.integers(1, max_accept + 1, batch).astype(np.int32)
        for row, life in enumerate(self._lives.values()):
            run = life.token_ids[life.taken : life.taken + accept_lens[row]]
            accept_lens[row] = len(run)
            token_ids[row, : len(run)] = run
            logprobs[row, : len(run)] = life.logprobs[life.taken : life.taken + len(run)]
            life.taken += len(run)
        return token_ids, logprobs, accept_lens

    def _judge(self, handles: NDArray[np.int64], control: Control) -> Control:
        control.reset(len(handles))
        for row, life in enumerate(self._lives.values()):
            if life.engine and life.taken == len(life.token_ids):
                control.finish(row, L.FINISH_LENGTH, match=len(life.token_ids))
        return control
