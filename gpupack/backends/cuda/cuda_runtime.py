"""CUDA (or HIP) behind the interface of `runtime.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gpupack.backends.cuda.runtime import Event
from gpupack.core.errors import InputError


class CudaRuntime:
    """CUDA (or HIP) through torch; host memory is pinned, which kernels reach by its own address.

    Work goes to `stream`; without one, to the stream that is current at each call. A named stream waits for what
    is enqueued on the current one, so inputs may be written there; who writes them again waits for `stream` first.
    Waiting for an event blocks the thread, or spins.
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

    def reaches(self, tensor: Tensor) -> bool:
        """Whether a tensor is on this device."""
        return tensor.device == self.device

    def upload(self, array: Tensor) -> Tensor:
        """A copy on the device, allocated and written on the packer's stream."""
        source = array.clone() if array.is_pinned() else array  # a copy from pinned memory would read it later
        with self.on_stream():
            return source.to(self.device, non_blocking=True)

    def record(self) -> Event:
        """A new CUDA event on the packer's stream."""
        event = torch.cuda.Event(blocking=self._blocking)
        with self.on_stream():
            event.record()
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
        capturing = self.stream is not None and torch.cuda.is_current_stream_capturing()
        if capturing and torch.cuda.current_stream() != self.stream:
            raise InputError(  # its replays would be ordered with nothing else of the packer
                f"enqueue: expected the packer's stream {self.stream} to be captured, or a packer without one of its "
                f"own, got {torch.cuda.current_stream()}"
            )
        with self.on_stream():
            kernel[(programs,)](*arguments, **constants, num_warps=warps)
        self.lend(inputs)

    def prepare(self, kernel: Any, arguments: Sequence[Tensor], constants: dict[str, Any], warps: int) -> None:
        """Compile a kernel for these arguments and load it, without launching it: a capture must not load."""
        compiled = kernel.warmup(*arguments, **constants, num_warps=warps, grid=(1,))
        compiled.run  # noqa: B018, loads the module

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        """A CUDA graph of what `work` enqueues, captured on the packer's stream."""
        return CudaGraph(self, work)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy between device memory and pinned memory."""
        with self.on_stream():
            target.copy_(source, non_blocking=True)

    def select(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """Enqueue `out[i] = source[index[i]]`."""
        with self.on_stream():
            torch.index_select(source, 0, index, out=out)
        self.lend((source,))

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy on a stream of its own, not behind what was launched since; returns when it is there."""
        self._side = self._side or torch.cuda.Stream(self.device)
        done = torch.cuda.Event(blocking=self._blocking)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            done.record()
        done.synchronize()  # as any wait for a step: torch's sync debug mode lets events be waited for, not streams

    def write(self, arena: Tensor, index: Tensor, values: Tensor) -> None:
        """Enqueue `arena[index] = values`, from pinned memory."""
        with self.on_stream():
            arena[index.to(self.device, non_blocking=True)] = values.to(self.device, non_blocking=True)

    def read(self, source: Tensor) -> Tensor:
        """A host copy of device memory, after all work enqueued so far; blocks."""
        with self.on_stream():
            return source.cpu()

    def span(self, name: str) -> AbstractContextManager[object]:
        """An NVTX range."""
        span: AbstractContextManager[object] = torch.cuda.nvtx.range(f"gpupack {name}")
        return span

    def on_stream(self) -> AbstractContextManager[object]:
        """The packer's stream as the current one, behind what is enqueued on the current one."""
        if self.stream is None or self.stream == torch.cuda.current_stream():
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def lend(self, inputs: Sequence[Tensor | None]) -> None:
        """Keep the memory of inputs, once their owner drops them, until the packer's stream got here."""
        if self.stream is not None:
            for array in inputs:
                if array is not None and array.is_cuda:
                    array.record_stream(self.stream)


class CudaGraph:
    """A captured launch; a replay goes to the packer's stream, like all of its work."""

    def __init__(self, runtime: CudaRuntime, work: Callable[[], None]) -> None:
        self._runtime = runtime
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=runtime.stream):
            work()

    def replay(self, inputs: Sequence[Tensor | None] = ()) -> None:
        """Enqueue the work once more."""
        with self._runtime.on_stream():
            self._graph.replay()
        self._runtime.lend(inputs)


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
