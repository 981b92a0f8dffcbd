"""What the packer asks of a device: memory, order, events, copies, launches, in one interface.

`device_cuda.py` is the device; `InterpreterRuntime` runs Triton's interpreter on host memory; tests have a simulated
device that does enqueued work late, in any order that a device may choose (`tests/simulated.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from gpupack.errors import ConfigError


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before it has been done; does not block."""
        ...

    def synchronize(self) -> None:
        """Block until the work before it has been done."""
        ...


class Graph(Protocol):
    """Work that was captured; it runs when it is replayed."""

    def replay(self, inputs: Sequence[Tensor | None] = ()) -> None:
        """Enqueue the work once more; `inputs` it reaches by addresses, as for `DeviceRuntime.launch`."""
        ...


class DeviceRuntime(Protocol):
    """Memory and order of one device. Work is enqueued on the packer's stream, unless said otherwise.

    The packer's stream is the caller's current one, or waits at each call for what was enqueued there.
    """

    device: torch.device
    lanes: int
    """Threads of a warp."""

    def zeros(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared device memory, `[words]`."""
        ...

    def host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared host memory `[words]` that kernels can read and write, and copies go to."""
        ...

    def reaches(self, tensor: Tensor) -> bool:
        """Whether kernels can read a tensor where it lies: it is device memory."""
        ...

    def upload(self, array: Tensor) -> Tensor:
        """A copy of host memory that launches from now on can read; the caller may change `array` at once."""
        ...

    def record(self) -> Event:
        """An event right behind the work enqueued so far, replays on the current stream included."""
        ...

    def launch(
        self,
        kernel: Any,
        programs: int,
        arguments: Sequence[Tensor],
        constants: dict[str, Any],
        warps: int,
        inputs: Sequence[Tensor | None] = (),
    ) -> None:
        """Enqueue `programs` programs of a Triton kernel; `inputs` it reaches by addresses in its arguments."""
        ...

    def prepare(self, kernel: Any, arguments: Sequence[Tensor], constants: dict[str, Any], warps: int) -> None:
        """Compile a kernel for these arguments, so that launching it compiles nothing."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` enqueues, as a graph, and not enqueued; ConfigError if the device has no graphs."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy from device memory to host memory."""
        ...

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy from device memory that no enqueued work writes to host memory; returns when it is there."""
        ...

    def write(self, arena: Tensor, index: Tensor, values: Tensor) -> None:
        """Enqueue `arena[index] = values`; `index` and `values` are host memory, left alone until it was done."""
        ...

    def read(self, source: Tensor) -> Tensor:
        """A host copy of device memory, after all work enqueued so far; blocks."""
        ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named span of the host's time, for profilers."""
        ...


def make_runtime(device: str, *, blocking: bool = True, stream: Any = None) -> DeviceRuntime:
    """The runtime for `PackerConfig.device`; ConfigError if it cannot be had here."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "interpret":
        if not interpreting:
            raise ConfigError("device: expected TRITON_INTERPRET=1 in the environment for 'interpret', it is not set")
        return InterpreterRuntime()
    if interpreting:
        raise ConfigError("device: expected TRITON_INTERPRET unset for 'cuda', it is 1")
    if not torch.cuda.is_available():
        raise ConfigError("device: expected a CUDA device for 'cuda', torch finds none")
    from gpupack.device.cuda import CudaRuntime

    return CudaRuntime(blocking=blocking, stream=stream)


_NO_SPAN: AbstractContextManager[object] = nullcontext()


class _Done:
    """The event of work that is done when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class HostRuntime:
    """A device in host memory, whose work has been done when a call returns; `launch` is the heir's."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.lanes = 32

    def zeros(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared memory, `[words]`."""
        return torch.zeros(words, dtype=dtype)

    def host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared memory, `[words]`."""
        return torch.zeros(words, dtype=dtype)

    def reaches(self, tensor: Tensor) -> bool:
        """False: every input comes as an array of the host."""
        return False

    def upload(self, array: Tensor) -> Tensor:
        """The array itself."""
        return array

    def record(self) -> Event:
        """An event that has happened."""
        return _Done()

    def prepare(self, kernel: Any, arguments: Sequence[Tensor], constants: dict[str, Any], warps: int) -> None:
        """Nothing to compile."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """ConfigError."""
        raise ConfigError(f"device: expected 'cuda' for a graph, got {self.device.type!r} memory")

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    fetch = copy

    def write(self, arena: Tensor, index: Tensor, values: Tensor) -> None:
        """`arena[index] = values`, now."""
        arena[index] = values

    def read(self, source: Tensor) -> Tensor:
        """A copy."""
        return source.clone()

    def span(self, name: str) -> AbstractContextManager[object]:
        """Nothing."""
        return _NO_SPAN


class InterpreterRuntime(HostRuntime):
    """Triton's interpreter: everything is host memory, and a launch has been done when it returns."""

    def launch(
        self,
        kernel: Any,
        programs: int,
        arguments: Sequence[Tensor],
        constants: dict[str, Any],
        warps: int,
        inputs: Sequence[Tensor | None] = (),
    ) -> None:
        """Run `programs` programs of a Triton kernel, one after another."""
        kernel[(programs,)](*arguments, **constants, num_warps=warps)
