"""Lives of a packer on the simulated device: nothing waits unless it must, the caller reuses its memory at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from protocol_failures import fail, refused
from protocol_inputs import Arguments, Passed, a_batch, a_config, a_request
from simulated import SimulatedRuntime
from strategies import End, Readmit
from test_lives import POISON, Harness, Play, check_guards, counters_of, expected_counters, rows_of

from gpupack.backends.cuda.backend import TritonBackend
from gpupack.core.config import PackerConfig
from gpupack.core.errors import BufferBusyError, ClosedError, InputError, ReleasedError
from gpupack.core.packed_output import PackedStep
from gpupack.packer.cuda_graph import PackGraph
from gpupack.packer.packer import Packer

BLOCK = 4  # rows a program
OPS = {
    "step": 8, "in_three_parts": 3, "replay": 3, "take_in": 4, "release": 4, "end_one": 3, "come_back": 2,
    "admit_some": 4, "pause": 2, "look": 1, "misuse": 1, "fail": 1,
}  # fmt: skip


class DeviceLife(Play):
    """A packer on the simulated device, and the oracle. A seed chooses what is done, and what the device does when."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.runtime = SimulatedRuntime(
            seed, named=self.rng.random() < 0.4, pace=self.rng.choice([0.0, 0.2, 0.5, 0.8, 0.95])
        )
        super().__init__(Harness("simulated", self.make, self.poison), a_config(self.rng), self.rng.random() < 0.7)
        self.backend: Any = self.packer.backend
        self.places: list[Any] = [None] * self.config.buffers  # of the ring: who has them, as the test knows
        self.launches = 0
        self.held: list[tuple[PackedStep, Any]] = []  # taken in, not released: the step, a copy
        self.graphs = [PackGraph(self.packer, size) for size in (self.config.batch_capacity, BLOCK)]
        self.over = False
        self.admit_some()

    def make(self, config: PackerConfig, **options: Any) -> Packer:
        packer = Packer(config, **options)
        packer.backend = TritonBackend(config, self.runtime, block=BLOCK)
        return packer

    def poison(self, packer: Packer, word: int) -> None:
        """Whatever nobody has is worthless: buffers of the ring, and their device memory."""
        for buffer, owner in zip(self.backend.ring.buffers, self.places, strict=True):
            if owner is None:
                staged = [memory.numpy() for memory in (buffer.handles, *buffer.lens.values())]
                for words in (buffer.out, buffer.control, *staged):
                    words.fill(word)
                if self.backend.ring.copies:
                    self.runtime.memory.view(self.backend.ring.device_out(buffer)).fill(word)

    # --- operations -------------------------------------------------------------------------------

    def live(self, ops: list[str]) -> None:
        """Do all of it, then take in, release and compare what is left."""
        for op in ops:
            if self.over:
                break
            getattr(self, op)()
            self.readers_see_what_they_saw()
        while self.in_flight and not self.over:
            self.take_in()
            self.readers_see_what_they_saw()
        while self.held:
            self.release()
        if not self.over:
            self.compare_states()
        self.runtime.memory.check()

    def readers_see_what_they_saw(self) -> None:
        for packed, copy in self.held:
            assert np.array_equal(packed.buffer, copy), "a buffer that a reader has was written"

    def admit_some(self) -> None:
        requests = [a_request(self.rng, self.config) for _ in range(self.rng.randint(1, 3))]
        self.admit(requests, [None] * len(requests), [None] * len(requests))

    def end_one(self) -> None:
        self.end(End(self.rng.randrange(8), self.rng.random() < 0.6, self.rng.choice([0, 0, 1, 2])))

    def come_back(self) -> None:
        self.readmit(Readmit(self.rng.randrange(4), self.rng.random() < 0.3))

    def pause(self) -> None:
        """The host does something else for a while."""
        for _ in range(self.rng.randrange(40)):
            self.runtime.breathe()

    def look(self) -> None:
        self.compare_states()

    def room(self) -> bool:
        """Whether a launch is possible; if not it is refused, and then there may be made room."""
        nothing = np.empty(0, np.int64)
        while True:
            if len(self.in_flight) == self.config.max_in_flight:
                error: type[Exception] = InputError
                make_room: Callable[[], None] = self.take_in
            elif self.places[self.launches % len(self.places)] is not None:
                error, make_room = BufferBusyError, self.release
            else:
                return True
            refused(error, lambda: self.packer.pack(nothing))
            if self.rng.random() < 0.3:
                return False
            make_room()

    def step(self) -> None:
        """An eager step."""
        if not self.room():
            return
        op = a_batch(self.rng, self.config, ["step", "step", "step", "append", "pack"])
        arguments = self.arguments(op)
        call = self.passed(arguments, self.rng.choice([0, 0.5, 1]))
        call.write()
        self.took(getattr(self.packer, op.kind)(*call.inputs, **call.given), op.kind, arguments)
        call.scribble()
        call.overwrite()

    def replay(self) -> None:
        """A step by a graph of the packer's own."""
        if not self.room():
            return
        op = a_batch(self.rng, self.config, ["step", "step", "pack"])
        arguments = self.arguments(op)
        call = self.passed(arguments, self.rng.choice([0, 0.5, 1]))
        call.write()
        graph = self.graphs[0]
        if len(arguments[0]) <= BLOCK:
            graph = self.rng.choice(self.graphs)
        else:
            refused(InputError, lambda: self.graphs[1].step(*call.inputs, **call.given))
        self.took(graph.step(*call.inputs, **call.given), op.kind, arguments)
        call.scribble()
        call.overwrite()

    def in_three_parts(self) -> None:
        """A step around a graph that an engine captured, and what may come between the parts."""
        if not self.room():
            return
        op = a_batch(self.rng, self.config, ["step", "step", "pack"])
        arguments = self.arguments(op)
        call = self.passed(arguments, self.rng.choice([0.5, 1, 1]))
        self.packer.prepare_launch(*call.inputs, **call.given)
        call.scribble()
        self.between()
        call.write()
        expected = getattr(self.oracle, op.kind)(arguments[0], *arguments[1], **arguments[2])
        self.graphs[0]._graph.replay(self.backend.inputs)
        self.between()
        self.took(self.packer.commit_launch(), op.kind, arguments, expected)
        call.overwrite()

    def passed(self, arguments: Arguments, share: float) -> Passed:
        """The arguments as the packer gets them; what nobody has is poisoned first."""
        self.poison(self.packer, POISON)
        return Passed(self.rng, self.runtime, arguments, share)

    def between(self) -> None:
        """Something between the parts of a step: endings, admissions, calls that are refused."""
        what = self.rng.randrange(6)
        if what == 0 and self.oracle.records:
            handle = self.rng.choice(list(self.oracle.records))
            refused(InputError, lambda: self.packer.retract(handle, output_len=0))
            self.packer.retire(np.array([handle]))
            self.oracle.retire([handle])
            self.ended.append(handle)
        elif what == 1:
            self.admit_some()
        elif what == 2:
            self.pause()
        elif what == 3:
            refused(InputError, lambda: self.packer.prepare_launch(np.empty(0, np.int64)))

    def took(self, ticket: Any, kind: str, arguments: Arguments, expected: Any = None) -> None:
        """A call gave a ticket; the oracle's, unless it was asked already."""
        control = arguments[2].get("control")
        if control is not None:
            assert np.array_equal(ticket.control, control.words), "the control of the call, as it was then"
        expected = expected or getattr(self.oracle, kind)(arguments[0], *arguments[1], **arguments[2])
        self.places[self.launches % len(self.places)] = ticket
        self.launches += 1
        self.in_flight.append((ticket, expected))

    def take_in(self) -> None:
        if not self.in_flight:
            return
        ticket, oracle_ticket = self.in_flight.pop(0)
        ready, parts = self.rng.random() < 0.5 and ticket.ready(), self.runtime.parts
        packed, expected = ticket.wait(), oracle_ticket.wait()
        if ready and not self.backend.ring.copies:
            assert self.runtime.parts == parts, "a step that is ready needs nothing more"
        assert rows_of(packed) == expected.rows
        assert counters_of(packed) == expected_counters(expected)
        check_guards(packed, oracle_ticket.launched, POISON)
        self.places[self.places.index(ticket)] = packed
        self.held.append((packed, packed.buffer.copy()))
        if self.rng.random() < 0.3:
            self.release()

    def release(self) -> None:
        """Some reader is done, in any order."""
        if self.held:
            packed, _ = self.held.pop(self.rng.randrange(len(self.held)))
            packed.release()
            self.places[self.places.index(packed)] = None
            refused(ReleasedError, lambda: packed.buffer)

    def misuse(self) -> None:
        """Calls that are refused and change nothing."""
        refused(InputError, self.packer.commit_launch)
        if len(self.in_flight) > 1:
            refused(InputError, self.in_flight[-1][0].wait)

    def fail(self) -> None:
        """Now and then a step goes wrong, or the packer is closed with steps in flight; it is closed either way."""
        if self.rng.random() < 0.3:
            fail(self)
            refused(ClosedError, lambda: self.packer.pack(np.empty(0, np.int64)))
            self.over = True
