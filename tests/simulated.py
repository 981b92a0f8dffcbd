"""A deterministic simulated device: what is enqueued runs late, in any order that a device may choose.

Streams are queues; work is done in parts, and between parts any other stream may go on. A seed chooses. Device
memory is not where its tensors say: a host that reads it finds poison, and what a host writes there is noticed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from gpupack.kernels.pack import pack_kernel
from numpy.typing import NDArray
from simulated_kernel import Launch
from simulated_memory import DeviceMemory
from torch import Tensor

Work = Callable[[], Iterator[None]]


class Stream:
    """Work in order; each item waits for marks of other streams first."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Work | Iterator[None], Sequence[Mark]]] = deque()
        self.enqueued = self.done = 0

    def can_go_on(self) -> bool:
        return bool(self.queue) and all(mark.happened for mark in self.queue[0][1])

    def go_on(self) -> None:
        """The next part of the first item."""
        work, marks = self.queue[0]
        if callable(work):
            work = work()
            self.queue[0] = (work, marks)
        try:
            next(work)
        except StopIteration:
            self.queue.popleft()
            self.done += 1


class Mark:
    """An event: the work that a stream had then."""

    def __init__(self, runtime: SimulatedRuntime, stream: Stream) -> None:
        self._runtime, self._stream, self._number = runtime, stream, stream.enqueued

    @property
    def happened(self) -> bool:
        return self._stream.done >= self._number

    def query(self) -> bool:
        """Whether the work before it has been done."""
        self._runtime.breathe()
        return self.happened

    def synchronize(self) -> None:
        """Let the device work, in any order, until the work before it has been done."""
        while not self.happened:
            self._runtime.meet("event")
            assert self._runtime.go_on(), "deadlock"


class SimulatedGraph:
    """Captured work."""

    def __init__(self, runtime: SimulatedRuntime, works: list[Work]) -> None:
        self._runtime, self._works = runtime, works

    def replay(self, inputs: Sequence[Tensor | None] = ()) -> None:
        """Enqueue it on the packer's stream."""
        for work in self._works:
            self._runtime.enqueue(work)


class SimulatedRuntime:
    """DeviceRuntime whose device has a stream of the engine, which is the current one, of the packer, and for fetches.

    `named`: the packer's stream is another than the engine's. `pace`: how likely the device goes on by a part,
    and by another, whenever the host calls.
    """

    def __init__(self, seed: int, *, named: bool = False, pace: float = 0.5) -> None:
        self.device, self.lanes = torch.device("cpu"), 32
        self.order, self.pace = random.Random(seed), pace
        self.memory = DeviceMemory()
        self.engine, self.side = Stream(), Stream()
        self.own = Stream() if named else self.engine
        self._streams = [self.engine, self.side] + [self.own] * named
        self.parts = 0  # done so far
        self.failing = ""  # "launch" or "event": what raises from now on
        self._captured: list[Work] | None = None

    # --- the device -------------------------------------------------------------------------------

    def go_on(self) -> bool:
        """Do one part of some stream's first item; False if none can."""
        ready = [stream for stream in self._streams if stream.can_go_on()]
        if not ready:
            return False
        self.parts += 1
        self.order.choice(ready).go_on()
        return True

    def meet(self, what: str) -> None:
        """The device reports its failure."""
        if self.failing == what:
            raise RuntimeError(f"simulated failure of a {what}")

    def breathe(self) -> None:
        """Time passes on the host: the device does some of its work, or none."""
        while self.order.random() < self.pace and self.go_on():
            pass

    def enqueue(self, work: Work) -> None:
        """Put work on the packer's stream, which waits for what is enqueued on the current one."""
        self.put(self.own, work, [] if self.own is self.engine else [Mark(self, self.engine)])

    def put(self, stream: Stream, work: Work, marks: Sequence[Mark] = ()) -> Mark:
        """Put work on a stream, behind marks of others; the mark behind it."""
        self.breathe()
        stream.queue.append((work, marks))
        stream.enqueued += 1
        mark = Mark(self, stream)
        self.breathe()
        return mark

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is enqueued inside goes to a stream that waits for nobody: wrong, to show that it is noticed."""
        own, self.own = self.own, self.side
        engine, self.engine = self.engine, self.side
        yield
        self.own, self.engine = own, engine

    # --- the engine's work, on the current stream -------------------------------------------------

    def tensor(self, like: NDArray[Any]) -> Tensor:
        """Device memory of the engine; what is in it is nobody's business."""
        return self.memory.add(torch.zeros(like.shape, dtype=torch.from_numpy(like).dtype), device=True)

    def sample(self, tensor: Tensor, values: NDArray[Any], marks: Sequence[Mark] = ()) -> None:
        """The engine writes a tensor of its own."""
        values = values.copy()

        def work() -> Iterator[None]:
            seen = self.memory.view(tensor)
            half = len(seen) // 2
            seen[:half] = values.reshape(-1)[:half]
            yield
            seen[half:] = values.reshape(-1)[half:]

        self.put(self.engine, work, marks)

    # --- DeviceRuntime ----------------------------------------------------------------------------

    def zeros(self, words: int, dtype: torch.dtype) -> Tensor:
        return self.memory.add(torch.zeros(words, dtype=dtype), device=True)

    def host(self, words: int, dtype: torch.dtype) -> Tensor:
        return self.memory.add(torch.zeros(words, dtype=dtype), device=False)

    def reaches(self, tensor: Tensor) -> bool:
        return self.memory.is_device(tensor)

    def upload(self, array: Tensor) -> Tensor:
        copy = self.tensor(array.numpy())
        values = array.numpy().copy()

        def work() -> Iterator[None]:
            self.memory.view(copy)[:] = values.reshape(-1)
            return
            yield

        self.enqueue(work)
        return copy

    def record(self) -> Mark:
        self.breathe()
        if self.own is not self.engine:
            self.enqueue(_nothing)
        return Mark(self, self.own)

    def launch(
        self, kernel: Any, programs: int, arguments: Sequence[Tensor], constants: dict[str, Any], warps: int,
        inputs: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        assert kernel is pack_kernel
        self.meet("launch")
        views = [self.memory.view(argument) for argument in arguments]

        def work() -> Iterator[None]:
            return Launch(self.memory, views, constants, programs * constants["BLOCK"]).run(self.order)

        if self._captured is not None:
            self._captured.append(work)
        else:
            self.enqueue(work)

    def prepare(self, kernel: Any, arguments: Sequence[Tensor], constants: dict[str, Any], warps: int) -> None:
        self.memory.seal()

    def capture(self, work: Callable[[], None]) -> SimulatedGraph:
        self._captured = []
        work()
        captured, self._captured = self._captured, None
        return SimulatedGraph(self, captured)

    def _copying(self, target: Tensor, source: Tensor) -> Work:
        def work() -> Iterator[None]:
            to, seen = self.memory.view(target), self.memory.view(source)
            middle = self.order.randrange(len(seen) + 1)
            to[middle:] = seen[middle:]
            yield
            to[:middle] = seen[:middle]

        return work

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.enqueue(self._copying(target, source))

    def fetch(self, target: Tensor, source: Tensor) -> None:
        self.put(self.side, self._copying(target, source)).synchronize()

    def write(self, arena: Tensor, index: Tensor, values: Tensor) -> None:
        def work() -> Iterator[None]:
            places = self.memory.view(index).copy()
            yield
            seen = self.memory.view(arena)
            assert ((places >= 0) & (places < len(seen))).all(), "a write outside the arena"
            seen[places] = self.memory.view(values)

        self.enqueue(work)

    def read(self, source: Tensor) -> Tensor:
        copy = self.host(source.numel(), source.dtype)
        self.enqueue(self._copying(copy, source))
        self.record().synchronize()
        return copy

    def span(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()


def _nothing() -> Iterator[None]:
    return iter(())
