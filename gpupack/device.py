"""The few things that a backend asks of a device: memory, host memory it can reach, events, copies in stream order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before it has been done; does not block."""
        ...

    def synchronize(self) -> None:
        """Block until the work before it has been done."""
        ...


class DeviceRuntime(Protocol):
    """Memory and order of one device; all work goes to the current stream."""

    device: torch.device
    lanes: int
    """Threads of a warp."""

    def zeros(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared device memory, `[words]`."""
        ...

    def host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared host memory `[words]` that kernels can read and write."""
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


class _TritonLaunch:
    """Launches as Triton does it; compiles at the first launch of a variant."""

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
        kernel[(programs,)](*arguments, **constants, num_warps=warps)


class CudaRuntime(_TritonLaunch):
    """CUDA (or HIP) through torch; host memory is pinned, which kernels reach by its own address."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.lanes = int(torch.cuda.get_device_properties(self.device).warp_size)

    def zeros(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared device memory, `[words]`."""
        return torch.zeros(words, dtype=dtype, device=self.device)

    def host(self, words: int, dtype: torch.dtype) -> Tensor:
        """Pinned host memory, `[words]`, cleared."""
        return torch.zeros(words, dtype=dtype, pin_memory=True)

    def record(self) -> Event:
        """A new CUDA event on the current stream."""
        event: Event = torch.cuda.current_stream().record_event()
        return event


class _Done:
    """The event of work that is done when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class InterpreterRuntime(_TritonLaunch):
    """Triton's interpreter: everything is host memory, and a launch has been done when it returns."""

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
