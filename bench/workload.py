"""What the benchmark serves: workloads as data, and the life of a batch that all peers live alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 128_000
EOS_TOKEN_ID = 2
PROMPT = range(100)
POOL_STEPS = 61  # steps of random tokens, used in turn; a prime, so that no interval divides it
TOP_STEPS = 7  # the same for top logprobs, which are large
LOGPROBS = {"none": -1, "sampled": 0, "top-5": 5, "top-20": 20}


@dataclass(frozen=True)
class Workload:
    """One configuration.

    Parameters
    ----------
    batch, interval
        Running requests, and their stream interval. They join one after another over the first `interval`
        steps, so that each later step sends an equal share.
    accept
        Tokens that each of them accepts in a step.
    finishing
        Share that ends in each step, by an end-of-sequence token; new requests take their places.
    logprobs
        A key of LOGPROBS.
    host_judged
        Share whose finish the engine decides, as SGLang's scheduler does for all of them.
    output_len
        Tokens after which all requests end, in one step, and new ones begin; 0: they run on.
    rate
        Steps a second; 0: the next step begins when the receiver has taken the last.
    """

    batch: int
    interval: int = 1
    accept: int = 1
    finishing: float = 0.0
    logprobs: str = "none"
    host_judged: float = 0.0
    output_len: int = 0
    rate: int = 0

    @property
    def top(self) -> int:
        """Top logprobs a token."""
        return max(LOGPROBS[self.logprobs], 0)

    @property
    def returns_logprobs(self) -> bool:
        """Whether every request asked for logprobs."""
        return self.logprobs != "none"

    def engine_judged(self, row: int) -> bool:
        """Whether the engine judges the requests in this place of the batch."""
        return int((row + 1) * self.host_judged) > int(row * self.host_judged)


class Step(NamedTuple):
    """One step of a batch: what the sampler and the engine know of it, on the host."""

    rows: int
    """Requests that take part, the first so many of the batch."""
    position: int
    """Tokens of the oldest request after this step."""
    new: list[tuple[int, str]]
    """Place and name of requests that begin with this step."""
    tokens: NDArray[np.int64]
    """`[rows, accept]`."""
    logprobs: NDArray[np.float32] | None
    """`[rows, accept]`."""
    top_val: NDArray[np.float32] | None
    """`[rows, accept, top]`."""
    top_idx: NDArray[np.int64] | None
    ending: NDArray[np.int64]
    """Places of the requests that end with this step."""
    at_length: bool
    """They end by length, else by the end-of-sequence token, which is their last."""


class Life:
    """The steps of a workload; the same for everyone who asks."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        random = np.random.default_rng(work.batch)
        shape = (work.batch, work.accept)
        self._tokens = [random.integers(EOS_TOKEN_ID + 1, VOCAB_SIZE, shape) for _ in range(POOL_STEPS)]
        self._logprobs = [-random.random(shape, np.float32) for _ in range(POOL_STEPS)]
        self._top_val = [-random.random((*shape, work.top), np.float32) for _ in range(TOP_STEPS)]
        self._top_idx = [random.integers(0, VOCAB_SIZE, (*shape, work.top)) for _ in range(TOP_STEPS)]
        self._count = self._named = self._position = self._turn = 0
        self._vacant: list[int] = []
        self._joined = 0

    def step(self) -> Step:
        """The next step."""
        work, k = self.work, self._count
        joined = -(-work.batch * min(k + 1, work.interval) // work.interval)
        self._vacant += range(self._joined, joined)
        new = [(place, f"{self._named + i:032x}") for i, place in enumerate(self._vacant)]
        if len(new) == work.batch:
            self._position = 0
        self._named += len(new)
        self._position += work.accept
        self._count, self._joined = k + 1, joined
        tokens = self._tokens[k % POOL_STEPS][:joined]
        ending, at_length = self._ending(), bool(work.output_len)
        if len(ending) and not at_length:
            tokens = tokens.copy()
            tokens[ending, -1] = EOS_TOKEN_ID
        self._vacant = ending.tolist()
        optional: list[Any] = [None, None, None]
        if work.returns_logprobs:
            optional[0] = self._logprobs[k % POOL_STEPS][:joined]
        if work.top:
            optional[1:] = self._top_val[k % TOP_STEPS][:joined], self._top_idx[k % TOP_STEPS][:joined]
        return Step(joined, self._position, new, tokens, *optional, ending, at_length)

    def _ending(self) -> NDArray[np.int64]:
        work = self.work
        if work.output_len:
            return np.arange(work.batch if self._position >= work.output_len else 0)
        share = round(work.batch * work.finishing)
        first, self._turn = self._turn, self._turn + share
        return np.sort(np.arange(first, first + share) % work.batch)


class Sent(NamedTuple):
    """One step as it was sent: nanoseconds of each stage, rows and bytes (0: nothing was due)."""

    stages_ns: tuple[int, ...]
    rows: int
    size: int


RowContent = tuple[str, list[int], list[float], list[list[float]], list[list[int]], str]
"""What a receiver has of a row: rid, token ids, logprobs, values and ids of top logprobs, type of its finish or ''."""
