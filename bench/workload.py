"""What the benchmark serves: requests that stay running, and what the model samples for them.

Requests join one after another over the first `interval` steps, so that later steps send an equal
share of them each. A case is short (hundreds of steps), so no output list of the loop grows beyond
what a running request has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 128_000
EOS_TOKEN_ID = 2
PROMPT = range(100)
POOL_STEPS = 61  # steps of random tokens, used in turn; a prime, so that no interval divides it


@dataclass(frozen=True)
class Case:
    """One configuration of the benchmark."""

    batch: int
    interval: int
    logprobs: bool

    def joined(self, step: int) -> int:
        """Requests of the batch that have joined by this step."""
        return -(-self.batch * min(step + 1, self.interval) // self.interval)

    def rids(self) -> list[str]:
        """Names as engines make them: 32 hexadecimal digits."""
        return [f"{i:032x}" for i in range(self.batch)]


class Sampled:
    """What the model put out, by step: token ids int64 `[batch]`, logprobs float32 `[batch]`."""

    def __init__(self, case: Case) -> None:
        random = np.random.default_rng(case.batch)
        self.tokens = [random.integers(EOS_TOKEN_ID + 1, VOCAB_SIZE, case.batch) for _ in range(POOL_STEPS)]
        self.logprobs = [-random.random(case.batch, np.float32) for _ in range(POOL_STEPS)]

    def at(self, step: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Of the first `count` requests."""
        return self.tokens[step % POOL_STEPS][:count], self.logprobs[step % POOL_STEPS][:count]


class Sent(NamedTuple):
    """One step: nanoseconds of each stage, rows and bytes."""

    stages_ns: tuple[int, ...]
    rows: int
    size: int


class Path(Protocol):
    """A path: `step` runs the next step; `stages` names what it times."""

    stages: tuple[str, ...]

    def step(self) -> Sent: ...
