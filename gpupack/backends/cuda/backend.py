"""The Triton backend: arenas on the device, one launch a step, a ring of buffers that the host reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpupack.backends.cuda.buffer_ring import LaunchRing
from gpupack.backends.cuda.host_runtime import make_runtime
from gpupack.backends.cuda.inflight import DeviceStep, sections
from gpupack.backends.cuda.launch_args import LaunchWriter
from gpupack.backends.cuda.offsets import ArenaPlaces
from gpupack.backends.cuda.runtime import DeviceRuntime
from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import InputError, StepFailedError
from gpupack.core.request import Resume
from gpupack.core.step_inputs import StepInputs
from gpupack.kernels.launch import LaunchShape, kernel_constants, launch_shape
from gpupack.kernels.pack import pack_kernel


class TritonBackend:
    """Arenas on the device; every step is one launch on one stream. One thread owns it.

    A step is `prepare` (host memory only), `enqueue` (the launch, which a CUDA graph can capture) and `commit`
    (copies, an event). The kernel is compiled when the backend is made, and never again.
    """

    def __init__(
        self,
        config: PackerConfig,
        runtime: DeviceRuntime | None = None,
        *,
        block: int | None = None,
        warps: int | None = None,
        stream: Any = None,
    ) -> None:
        self.config = config
        self._shape = config.packed_shape
        self.runtime = runtime or make_runtime(config.device, blocking=config.wait == "block", stream=stream)
        self.shape: LaunchShape = launch_shape(config, block, warps, self.runtime.lanes)
        self._places = ArenaPlaces(config)
        self.arena = self.runtime.zeros(self._places.words, torch.int32)
        self.scan = self.runtime.zeros(L.SCAN_HEADER + len(L.SCAN_AXES) * self.shape.blocks, torch.int64)
        self.scan[L.SCAN_LAUNCH] = 1
        self.ring = LaunchRing(self.runtime, config)
        self._writer = LaunchWriter(config, self.runtime)
        self._launch = 0
        self._prepared: DeviceStep | None = None
        self.inputs: list[Tensor | None] = []  # of the launch that was prepared last
        self._batch = 0
        self._constants = kernel_constants(config, self.shape)
        self.runtime.prepare(pack_kernel, self._arguments, self._constants, self.shape.warps)

    @property
    def _arguments(self) -> tuple[Tensor, ...]:
        return (self.arena, self.ring.control, self.ring.out, self.scan)

    # --- life of a handle -------------------------------------------------------------------------

    def install(self, slots: NDArray[np.int64], rows: NDArray[np.int32], resumes: Sequence[Resume]) -> None:
        """Begin handles in stream order: write their state, and what a resumed one has not sent yet."""
        with self.runtime.span("admit"):
            self._write(*self._places.installed(slots, rows, resumes))

    def end(self, slots: NDArray[np.int64]) -> None:
        """End handles in stream order: launches enqueued from now on find no live slot."""
        self._write(slots * L.STATE_WIDTH + L.FLAGS, np.zeros(len(slots), np.int32))

    def state_row(self, slot: int) -> NDArray[np.int32]:
        """Copy of a slot's state, int32 `[STATE_WIDTH]`; waits for all launches (retraction only)."""
        return self._read(slot * L.STATE_WIDTH, L.STATE_WIDTH)

    def spec_row(self, slot: int) -> NDArray[np.int32]:
        """Copy of a slot's speculative counters, int32 `[spec_width]`; waits for all launches (retraction only)."""
        width = self.config.spec_width
        return self._read(self._places.spec + slot * width, width)

    def unsent(self, slot: int, begin: int, end: int, channel: int = L.CHANNEL_TOKENS) -> NDArray[np.int32]:
        """Copy of a channel's output items [begin, end), int32; waits for all launches (retraction only)."""
        start, places = self._places.ring(slot, channel, int(self.state_row(slot)[L.WIDTHS]))
        items = self._read(start, int(places.max(initial=-1)) + 1)
        return items[places[np.arange(begin, end) % len(places)]].ravel()

    # --- steps ------------------------------------------------------------------------------------

    def step(self, handles: Any, inputs: StepInputs, control: NDArray[np.int32] | None, mode: int) -> DeviceStep:
        """Launch a step; see Packer.step.

        No synchronisation, and no device allocation as long as handles and lens alone are on the host.
        """
        self.prepare(handles, inputs, control, mode)
        try:
            with self.runtime.span("launch"):
                self.enqueue(self._batch)
            return self.commit()
        except InputError as error:  # too late for that: the launch has been counted
            raise StepFailedError(f"step {self._launch}: it was not launched: {error}") from error

    def span(self, name: str) -> AbstractContextManager[object]:
        """An NVTX range on CUDA."""
        return self.runtime.span(name)

    def prepare(self, handles: Any, inputs: StepInputs, control: NDArray[np.int32] | None, mode: int) -> None:
        """Write what the next launch is told, and count it. BufferBusyError, InputError: nothing was changed.

        Writes to host memory, except that inputs other than handles and lens are copied if they are on the host.
        """
        if self._prepared is not None:
            raise InputError("prepare_launch: expected commit_launch() after the one before, got another")
        buffer = self.ring.take()
        number = self._launch % (2**31 - 1) + 1
        self.inputs = self._writer.write(buffer, handles, inputs, control, mode, number)
        self._batch = len(handles)
        self.ring.advance()
        self._launch = number
        layout = L.packed_layout(self._batch, self._shape)
        with_logprobs = self.config.logprobs and bool(mode & L.MODE_LOGPROBS)
        self._prepared = DeviceStep(
            self.runtime, self.ring, buffer, self._launch, layout,
            logprobs=with_logprobs, spec_width=self.config.spec_width,
        )  # fmt: skip

    def enqueue(self, batch_capacity: int) -> None:
        """Launch for batches of up to `batch_capacity` rows; all that it uses has fixed addresses."""
        programs = max(-(-batch_capacity // self.shape.block), 1)
        self.runtime.launch(pack_kernel, programs, self._arguments, self._constants, self.shape.warps, self.inputs)

    def commit(self) -> DeviceStep:
        """Record the event of the launch that was prepared, behind the copies of what it is expected to fill."""
        step = self._prepared
        if step is None:
            raise InputError("commit_launch: expected prepare_launch() before, got none")
        copied = self._copy_expected(step) if self.ring.copies else {}
        step.committed(self.runtime.record(), copied)
        self._prepared = None
        return step

    def close(self) -> None:
        """Wait for what was enqueued: the memory that it writes must not be somebody else's by then."""
        with suppress(RuntimeError):  # the device failed, nothing runs there any more
            self.runtime.record().synchronize()

    def _copy_expected(self, step: DeviceStep) -> dict[int, int]:
        """Copy what fills if every row sends its run and no more: what was copied, by section."""
        config, source = self.config, self.ring.device_out(step.buffer)
        items = self._batch * int(step.buffer.control[L.LAUNCH_MAX_ACCEPT])
        logprobs = items if config.logprobs and step.buffer.control[L.LAUNCH_HAS_LOGPROBS] else 0
        given = step.buffer.control[L.LAUNCH_TOP_WIDTH] or step.buffer.control[L.LAUNCH_IDS_WIDTH]
        families = logprobs * config.family_width if given else 0
        copied = {}
        for start, words in sections(step.layout, items, logprobs, families):
            copied[start] = words
            if words:
                self.runtime.copy(step.buffer.out_tensor[start : start + words], source[start : start + words])
        return copied

    def _read(self, start: int, words: int) -> NDArray[np.int32]:
        copy: NDArray[np.int32] = self.runtime.read(self.arena[start : start + words]).numpy()
        return copy

    def _write(self, index: NDArray[np.int64], values: NDArray[np.int32]) -> None:
        """Write arena words in stream order, from staging memory that nobody writes again."""
        staged_index = self.runtime.host(len(index), torch.int64)
        staged_values = self.runtime.host(len(values), torch.int32)
        staged_index.numpy()[:] = index
        staged_values.numpy()[:] = values
        self.runtime.write(self.arena, staged_index, staged_values)
