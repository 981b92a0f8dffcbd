"""Torn frames: is a packed step whole when its event says so, and does nothing arrive afterwards?

Before each step a long kernel is queued, so the launch is far from done when the host gets its ticket, and
the host looks at once when it is. Behind each step the inputs are overwritten, in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from device_place import Place
from device_reference import MismatchError, expect

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig, Wait
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Request
from gpupack.packer.cuda_graph import PackGraph
from gpupack.packer.packer import Packer

Row = dict[str, Any]
ROWS = 640  # five blocks
TOP = 2
VARIETY = 64  # different inputs, used in turn
MODES: tuple[tuple[Any, Wait], ...] = (("mapped", "spin"), ("copy", "spin"), ("mapped", "block"), ("copy", "block"))


def run(place: Place, steps: int, left: Callable[[], float]) -> Iterator[Row]:
    """`steps` steps in each mode; half of them by a graph, where there are graphs."""
    for number, (transfer, wait) in enumerate(MODES):
        soak = Soak(place, transfer, wait, seed=number)
        share = left() / (len(MODES) - number)
        until = left() - share
        done, failed = 0, ""
        try:
            while done < steps and left() > until:
                soak.step(done)
                done += 1
            soak.drain()
        except MismatchError as error:
            failed = f"step {done}: {error}"
        if not failed and done < min(steps, 100):
            failed = f"time ran out after {done} steps"
        elif not failed and 10 * soak.early_ready > done:  # a few: the host was held up for longer than the kernel ran
            failed = f"{soak.early_ready} of {done} launches waited for the kernel before them"
        yield {"check": f"no torn frame, {transfer}, {wait}", "steps": done, "passed": not failed, "detail": failed}


class Soak:
    """Requests that send a token in each step: what a step must hold is known without a reference."""

    def __init__(self, place: Place, transfer: Any, wait: Wait, seed: int) -> None:
        config = PackerConfig(
            128_000, capacity=ROWS, window=8, max_top_logprobs=TOP, family_window=8, transfer=transfer, wait=wait,
            device=place.name,
        )  # fmt: skip
        self.place = place
        self.packer = Packer(config)
        requests = [Request(f"r{i}", return_logprob=True, top_logprobs_num=TOP) for i in range(ROWS)]
        rng = np.random.default_rng(seed)
        self.handles = rng.permutation(self.packer.admit(requests))
        self.host = {
            "token_ids": rng.integers(0, 128_000, (VARIETY, ROWS)),
            "logprobs": rng.random((VARIETY, ROWS), np.float32),
            "top_logprobs_val": rng.random((VARIETY, ROWS, TOP), np.float32),
            "top_logprobs_idx": rng.integers(0, 128_000, (VARIETY, ROWS, TOP)),
        }
        self.device = {name: place.tensor(array) for name, array in self.host.items()}
        self.inputs = {name: array[0].clone() for name, array in self.device.items()}  # written before each step
        self.on_device = place.tensor(self.handles) if place.cuda else self.handles
        self.graph = PackGraph(self.packer) if place.cuda else None
        self.early_ready = 0
        self._in_flight: list[tuple[int, Any]] = []

    def step(self, number: int) -> None:
        """Launch behind a long kernel; then take in the step before."""
        self.place.sleep()
        for name, array in self.device.items():
            self.inputs[name].copy_(array[number % VARIETY])
        launch = self.graph.step if self.graph is not None and number % 2 else self.packer.step
        ticket = launch(self.on_device, **self.inputs)
        if self.place.cuda:
            self.early_ready += ticket.ready()
            for array in self.inputs.values():  # what has not been read by now is lost
                array.zero_()
        self._in_flight.append((number, ticket))
        if len(self._in_flight) == 2:
            self.take_in()

    def drain(self) -> None:
        """Take in what is left."""
        while self._in_flight:
            self.take_in()

    def take_in(self) -> None:
        number, ticket = self._in_flight.pop(0)
        packed = ticket.wait()
        at_once = packed.buffer[: self._used(packed)].copy()
        self.check(number, packed)
        expect("the step as it was at its event, and later", at_once, packed.buffer[: len(at_once)])
        packed.release()

    def _used(self, packed: PackedStep) -> int:
        return packed.geometry.families + ROWS * 2 * TOP

    def check(self, number: int, packed: PackedStep) -> None:
        """Every word that a step of one token a request has."""
        host = {name: array[number % VARIETY] for name, array in self.host.items()}
        everyone, ahead = np.arange(ROWS), np.arange(ROWS + 1)
        expect("rows, tokens", (ROWS, ROWS), (packed.rows, packed.header(L.H_TOKENS)))
        columns = {
            L.R_BATCH_INDEX: everyone,
            L.R_SLOT: self.handles & 0xFFFFFFFF,
            L.R_GENERATION: self.handles >> 32,
            L.R_FLAGS: everyone * 0,
            L.R_VISIBLE_LEN: everyone * 0 + number + 1,
            L.R_MATCH: everyone * 0,
            L.R_TOKEN_START: everyone * 0 + number,
            L.R_LOGPROB_START: everyone * 0 + number,
            L.R_TOKEN_INDPTR: ahead,
            L.R_LOGPROB_INDPTR: ahead,
            L.R_FAMILIES_INDPTR: ahead * 2 * TOP,
        }
        for field, expected in columns.items():
            expect(f"column {field}", expected, packed.column(field))
        expect("token_ids", host["token_ids"], packed.token_ids)
        expect("logprobs", host["logprobs"].view(np.int32), packed.logprobs.view(np.int32))
        words = [host["top_logprobs_val"].view(np.int32), host["top_logprobs_idx"].astype(np.int32)]
        expect("families", np.concatenate(words, axis=1).ravel(), packed.families)
