"""What a life on the simulated device is made of: configurations, requests, batches, and the memory of a call."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import numpy as np
from simulated import Mark, SimulatedRuntime
from strategies import ACTIONS, PRESETS, Batch, RowPlan
from test_lives import POISON
from torch import Tensor

from gpupack.backends.cuda.device_inputs import LENS
from gpupack.core.config import PackerConfig
from gpupack.core.request import NO_LIMIT, Request
from gpupack.core.row_control import Control

Arguments = tuple[Any, list[Any], dict[str, Any]]  # handles, further positional arguments, the rest


def a_config(rng: random.Random) -> PackerConfig:
    """Small sizes, so that windows, slots and buffers run out all the time."""
    pick = rng.choice
    window, in_flight, logprobs = pick([4, 8, 8, 16]), pick([1, 2, 2, 3]), rng.random() < 0.8
    return PackerConfig(
        vocab_size=pick([8, 1000]),
        eos_token_ids=pick([(), (1,), (1, 3)]),
        capacity=pick([4, 6, 9]),
        window=window,
        max_in_flight=in_flight,
        max_accept=rng.randint(1, min(3, (window - 1) // in_flight)),
        stream_interval=pick([1, 1, 2, 3]),
        force_interval=pick([1, 3, 50]),
        logprobs=logprobs,
        max_top_logprobs=pick([0, 2]) * logprobs,
        max_token_ids_logprobs=pick([0, 0, 2]) * logprobs,
        speculative=pick([False, False, True]),
        transfer=pick(["mapped", "copy"]),
        policy=PRESETS[pick(list(PRESETS))],
    )


def a_request(rng: random.Random, config: PackerConfig) -> Request:
    """Of every judge and kind."""
    pick = rng.choice
    scored = config.logprobs and rng.random() < 0.6
    return Request(
        f"r{rng.random()}",
        max_new_tokens=pick([NO_LIMIT] * 4 + [40, 9, 3, 1, 0]),
        stream=rng.random() < 0.7,
        stream_interval=pick([None, 1, 2, 50, 50]),
        stop_token_ids=pick([[], [2], [2, 5]]),
        judge=pick([None, None, "device", "host", "engine"]),
        return_logprob=scored,
        top_logprobs_num=rng.randint(0, config.max_top_logprobs) * scored,
        token_ids_logprob=[7] * rng.randint(0, config.max_token_ids_logprobs) * scored,
    )


def a_batch(rng: random.Random, config: PackerConfig, kinds: list[str]) -> Batch:
    """One call of a kind."""
    most = config.max_accept
    rows = []
    for _ in range(rng.choice([rng.randint(0, config.batch_capacity), config.batch_capacity])):
        run = [(rng.randrange(20) + 2) % 20 for _ in range(rng.randint(0, most))]
        action = rng.choice(ACTIONS)
        rows.append(RowPlan(rng.randrange(12), run, action, rng.randint(-1, 9), rng.randint(1, 5), rng.randrange(14)))
    return Batch(
        rng.choice(kinds), rows, return_logprob=rng.random() < 0.7, with_control=rng.random() < 0.3,
        wide=rng.random() < 0.5, extra=rng.randrange(3), extra_scores=rng.randrange(3), lens=rng.randrange(3),
        flat=rng.random() < 0.5, everyone=rng.random() < 0.6,
    )  # fmt: skip


class Passed:
    """The arguments of a call, as the packer gets them: some on the device, all of it overwritten as soon as may be."""

    def __init__(self, rng: random.Random, runtime: SimulatedRuntime, arguments: Arguments, share: float) -> None:
        """`share` of the arrays are on the device; the engine writes them with `write`."""
        handles, inputs, given = arguments
        self.runtime = runtime
        self._values: list[tuple[Tensor, Any]] = []
        on_device = {name: rng.random() < share for name in (*given, 0, 1)}
        self.inputs = [self._one(i, array, on_device[i]) for i, array in enumerate([handles, *inputs])]
        self.given = {name: self._one(name, value, on_device[name]) for name, value in given.items()}

    def _one(self, name: Any, value: Any, on_device: bool) -> Any:
        if not isinstance(value, np.ndarray):
            return deepcopy(value)
        if not on_device or not value.size:
            return value.copy()
        array = value.astype(np.int32) if name in LENS else value
        self._values.append((self.runtime.tensor(array), array))
        return self._values[-1][0]

    def write(self) -> None:
        """The engine's work before the launch."""
        for tensor, array in self._values:
            self.runtime.sample(tensor, array)

    def scribble(self) -> None:
        """The host uses its memory again."""
        for value in (*self.inputs, *self.given.values()):
            if isinstance(value, np.ndarray):
                value.reshape(-1).view(np.uint8).fill(POISON & 0xFF)
            elif isinstance(value, Control):
                value.words.fill(POISON)

    def overwrite(self) -> None:
        """The engine's next work, on its own stream: another waits for the packer's."""
        marks = [] if self.runtime.own is self.runtime.engine else [Mark(self.runtime, self.runtime.own)]
        for tensor, array in self._values:
            self.runtime.sample(tensor, np.full_like(array, 77), marks)
