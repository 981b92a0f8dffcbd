"""What the packer asks of a device: memory, order, events, copies, launches, in one interface.

`CudaRuntime` is the device; `InterpreterRuntime` runs Triton's interpreter on host memory; tests have a simulated
device that does enqueued work late, in any order that a device may choose (`tests/simulated.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
        """Enqueue a copy between device memory and host memory."""
        ...

    def select(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """Enqueue `out[i] = source[index[i]]`: rows of `[n, width]` device memory by int64 numbers that are good."""
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
