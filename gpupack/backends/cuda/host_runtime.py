"""A device in host memory, on which Triton's interpreter runs; and the runtime that a configuration gets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gpupack.backends.cuda.runtime import DeviceRuntime, Event, Graph
from gpupack.core.errors import ConfigError


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
    from gpupack.backends.cuda.cuda_runtime import CudaRuntime

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

    def select(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """`out[i] = source[index[i]]`, now."""
        torch.index_select(source, 0, index, out=out)

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
