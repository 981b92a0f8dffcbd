"""What the packer asks of a device: memory, order, events, copies, launches, in one interface.

`CudaRuntime` is the device; `InterpreterRuntime` runs Triton's interpreter on host memory; tests have a
simulated device that does enqueued work late, in any order that a device may choose (`tests/simulated.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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


class DeviceRuntime(Protocol):
    """Memory and order of one device. Work is enqueued on the packer's stream, unless said otherwise."""

    device: torch.device
    lanes: int
    """Threads of a warp."""

    def zeros(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared device memory, `[words]`."""
        ...

    def host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared host memory `[words]` that kernels can read and write, and copies go to."""
        ...

    def record(self) -> Event:
        """An event right behind the work enqueued so far."""
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
    return CudaRuntime(blocking=blocking, stream=stream)


class CudaRuntime:
    """CUDA (or HIP) through torch; host memory is pinned, which kernels reach by its own address.

    Work goes to `stream`; without one, to the stream that is current at each call. A named stream waits for what
    is enqueued on the current one, so inputs may be written there. Waiting blocks the thread, or spins.
    """

    def __init__(self, *, blocking: bool = True, stream: torch.cuda.Stream | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.lanes = int(torch.cuda.get_device_properties(self.device).warp_size)
        self.stream = stream
        self._blocking = blocking
        self._side: torch.cuda.Stream | None = None

    def zeros(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared device memory, `[words]`."""
        return torch.zeros(words, dtype=dtype, device=self.device)

    def host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Pinned host memory, `[words]`, cleared."""
        return torch.zeros(words, dtype=dtype, pin_memory=True)

    def record(self) -> Event:
        """A new CUDA event on the packer's stream."""
        event = torch.cuda.Event(blocking=self._blocking)
        event.record(self.stream or torch.cuda.current_stream())
        return event if self._blocking else SpinningEvent(event)

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
        with self._on_stream():
            kernel[(programs,)](*arguments, **constants, num_warps=warps)
        if self.stream is not None:
            for array in inputs:
                if array is not None and array.is_cuda:
                    array.record_stream(self.stream)

    def prepare(self, kernel: Any, arguments: Sequence[Tensor], constants: dict[str, Any], warps: int) -> None:
        """Compile a kernel for these arguments and load it, without launching it: a capture must not load."""
        compiled = kernel.warmup(*arguments, **constants, num_warps=warps, grid=(1,))
        compiled.run  # noqa: B018, loads the module

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy from device memory to pinned memory."""
        with self._on_stream():
            target.copy_(source, non_blocking=True)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy on a stream of its own, not behind what was launched since; returns when it is there."""
        self._side = self._side or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        self._side.synchronize()

    def write(self, arena: Tensor, index: Tensor, values: Tensor) -> None:
        """Enqueue `arena[index] = values`, from pinned memory."""
        with self._on_stream():
            arena[index.to(self.device, non_blocking=True)] = values.to(self.device, non_blocking=True)

    def read(self, source: Tensor) -> Tensor:
        """A host copy of device memory, after all work enqueued so far; blocks."""
        with self._on_stream():
            return source.cpu()

    def span(self, name: str) -> AbstractContextManager[object]:
        """An NVTX range."""
        span: AbstractContextManager[object] = torch.cuda.nvtx.range(f"gpupack {name}")
        return span

    def _on_stream(self) -> AbstractContextManager[object]:
        if self.stream is None:
            return _NO_SPAN
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)


class SpinningEvent:
    """An event whose waiter spins: the result is seen sooner, at the price of a busy thread."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        """Whether the work before it has been done; does not block."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Spin until the work before it has been done."""
        while not self._event.query():
            pass


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

    def record(self) -> Event:
        """An event that has happened."""
        return _Done()

    def prepare(self, kernel: Any, arguments: Sequence[Tensor], constants: dict[str, Any], warps: int) -> None:
        """Nothing to compile."""

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
