"""Rows packed as runs are those packed one at a time, bit for bit: large mixed batches, the gate's rows included."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gpupack.backends.cpu.input_checks import LIMIT_RUN
from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.request import FRESH, NO_LIMIT, Request
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.streamer.host_judged import HostJudged

ROWS, STEPS = 60, 12
NEVER = 1 << 30


@dataclass
class Side:
    """A packer and its gate, with runs from `least` rows on."""

    config: PackerConfig
    least: int
    requests: list[Request]
    handles: Any = field(init=False)

    def __post_init__(self) -> None:
        self.packer = Packer(self.config)
        self.judged = HostJudged(self.packer)
        self.handles = self.packer.admit(self.requests)
        judges = self.judged.judges_of(self.requests, None)
        self.judged.admit(self.handles, self.requests, [FRESH] * len(self.requests), judges, None)
        for backend in (self.packer.backend, self.judged._gate._backend):
            backend._limits[LIMIT_RUN] = self.least

    def step(self, batch: Any, inputs: dict[str, Any], control: Any, returns: bool) -> list[list[int]]:
        """Every word that says something of the packed step and of the gate's."""
        asked = None
        if control is not None:
            asked = Control(len(batch)).reset(len(batch))
            asked.words[:] = control
        ticket = self.packer.step(self.handles[batch], **inputs, control=asked, return_logprob=returns)
        packed = ticket.wait()
        steps = [packed, *(self.judged.decide(packed, ticket, None) if packed.header(L.H_CONVEYED) else ())]
        found = []
        for one in steps:
            found += [one.header_words, *(one.column(field).tolist() for field in range(L.ROW_WIDTH))]
            found += [one.token_ids.tolist(), one.logprobs.view(np.int32).tolist(), one.families.tolist()]
        for one in steps:
            one.release()
        return found

    def states(self) -> Any:
        """What both remember."""
        return [one.arenas.state.copy() for one in (self.packer.backend, self.judged._gate._backend)]


def requests_of(random: np.random.Generator, scores: bool) -> list[Request]:
    """Mostly alike: each token is sent, without an end; some are judged by the engine, held back, or soon at an end."""
    found = []
    for i in range(ROWS):
        asked = scores and bool(random.integers(2))
        found.append(
            Request(
                f"r{i}",
                [1],
                max_new_tokens=int(random.choice([NO_LIMIT, 3, 7], p=[0.8, 0.1, 0.1])),
                stream_interval=int(random.choice([1, 3], p=[0.9, 0.1])),
                judge="engine" if i > 50 or random.random() < 0.1 else None,
                return_logprob=asked,
                top_logprobs_num=int(random.integers(3)) if asked else 0,
            )
        )
    return found


@pytest.mark.parametrize("seed", range(24))
def test_runs_pack_what_rows_pack(seed):
    random = np.random.default_rng(seed)
    scores = seed % 3 > 0
    config = PackerConfig(
        vocab_size=100, eos_token_ids=(2,), capacity=64, max_accept=2, logprobs=scores, max_top_logprobs=2 * scores
    )
    requests = requests_of(random, scores)
    sides = [Side(config, least, requests) for least in (1, 5, NEVER)]
    sent = runs = 0
    for _ in range(STEPS):
        batch = random.permutation(ROWS) if seed % 2 else np.arange(ROWS)
        width = int(random.integers(1, 3))
        ids = random.choice([7, 2, 500, 2**40], p=[0.94, 0.04, 0.01, 0.01], size=(ROWS, width))
        inputs: dict[str, Any] = {
            "token_ids": ids,
            "accept_lens": random.choice([1, width, 0], p=[0.9, 0.05, 0.05], size=ROWS),
        }
        if scores:
            inputs["logprobs"] = random.random((ROWS, width), np.float32)
            inputs["top_logprobs_val"] = random.random((ROWS, width, 2), np.float32)
            inputs["top_logprobs_idx"] = random.integers(0, 100, (ROWS, width, 2))
        control = None
        if random.random() < 0.5:
            control = Control(ROWS).reset(ROWS).words
            control[L.CONTROL_FLAGS_ROW] = random.choice(
                [0, L.CONTROL_HOLD, L.CONTROL_SKIP], p=[0.9, 0.05, 0.05], size=ROWS
            )
        returns = bool(random.random() < 0.8)
        first, *others = (side.step(batch, inputs, control, returns) for side in sides)
        assert all(other == first for other in others)
        kinds = sides[0].packer.backend._kinds[:ROWS]
        runs += int(np.count_nonzero(kinds))
        sent += first[0][L.H_TOKENS]
    for name, *states in zip(("packer", "gate"), *(side.states() for side in sides), strict=True):
        assert all(np.array_equal(states[0], state) for state in states[1:]), name
    assert runs > sent / 3  # runs there were
