"""The Triton backend: launch, ring of pinned buffers, events."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpupack import layout as L
from gpupack.checks import check_rows, host_array
from gpupack.config import PackerConfig
from gpupack.device import CudaRuntime, DeviceRuntime, Event, InterpreterRuntime
from gpupack.errors import BufferBusyError, ConfigError, InputError, StepFailedError
from gpupack.kernels.launch import LaunchShape, kernel_constants, launch_shape
from gpupack.packed import PackedStep
from gpupack.request import Resume


def make_runtime(device: str) -> DeviceRuntime:
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
    return CudaRuntime()


class _Buffer:
    """One buffer of the ring: packed step and control, host memory that the kernel reaches."""

    def __init__(self, runtime: DeviceRuntime, config: PackerConfig, words: int) -> None:
        self.out = runtime.host(words, torch.int32)
        self.control = runtime.host(L.LAUNCH_WORDS + L.CONTROL_WIDTH * config.batch_capacity, torch.int32)
        self.handles = runtime.host(config.batch_capacity, torch.int64)
        self.accept_lens = runtime.host(config.batch_capacity, torch.int32)
        self.out_words: NDArray[np.int32] = self.out.numpy()
        self.control_words: NDArray[np.int32] = self.control.numpy()


class DeviceStep:
    """A launch in flight: its buffer and its event."""

    __slots__ = ("_backend", "_buffer", "_event", "_layout", "_packed", "_with_logprobs", "number")

    def __init__(
        self, backend: TritonBackend, buffer: _Buffer, event: Event, number: int, layout: L.PackedLayout, scores: bool
    ) -> None:
        self._backend = backend
        self._buffer = buffer
        self._event = event
        self._layout = layout
        self._with_logprobs = scores
        self._packed: PackedStep | None = None
        self.number = number

    def ready(self) -> bool:
        """Whether the launch has been done; does not block."""
        return self._event.query()

    def result(self) -> PackedStep:
        """The packed step; blocks until the launch has been done. StepFailedError if it went wrong."""
        if self._packed is None:
            self._event.synchronize()
            words = self._buffer.out_words
            launch, error = int(words[L.H_LAUNCH]), int(words[L.H_ERROR])
            if launch != self.number or error:
                cause = "accept_lens out of range, or no logprobs for a request that asked"
                raise StepFailedError(
                    f"step {self.number}: the kernel reported launch {launch}, error {error} "
                    f"({cause if error == L.ERROR_INPUT else 'launch numbers differ'})"
                )
            scores = self._with_logprobs or bool(words[L.H_LOGPROBS])
            self._packed = PackedStep(words, self._layout, scores, self._release)
        return self._packed

    def _release(self, _: NDArray[np.int32]) -> None:
        self._backend.give_back(self._buffer)


class TritonBackend:
    """Arenas on the device; every step is one launch on the current stream. One thread owns it."""

    def __init__(
        self,
        config: PackerConfig,
        runtime: DeviceRuntime | None = None,
        *,
        block: int | None = None,
        warps: int | None = None,
    ) -> None:
        self.config = config
        self.runtime = runtime or make_runtime(config.device)
        self.shape: LaunchShape = launch_shape(config, block, warps, self.runtime.lanes)
        words = config.capacity * (L.STATE_WIDTH + config.window * (2 if config.logprobs else 1))
        self.arena = self.runtime.zeros(words, torch.int32)
        self.scan = self.runtime.zeros(L.SCAN_HEADER + len(L.SCAN_AXES) * self.shape.blocks, torch.int64)
        self.scan[0] = 1
        self._ones = self.runtime.zeros(config.batch_capacity, torch.int32) + 1
        size = L.packed_layout(config.batch_capacity, config.max_items, config.logprobs).size
        self._free = [_Buffer(self.runtime, config, size) for _ in range(config.buffers)]
        self._constants = kernel_constants(config, self.shape)
        self._launch = 0
        self._staging: deque[tuple[Event, list[Tensor]]] = deque()

    # --- life of a handle -------------------------------------------------------------------------

    def install(self, slots: NDArray[np.int64], rows: NDArray[np.int32], resumes: Sequence[Resume]) -> None:
        """Begin handles in stream order: write their state, and what a resumed one has not sent yet."""
        config = self.config
        index = [slots[:, None] * L.STATE_WIDTH + np.arange(L.STATE_WIDTH)]
        values = [rows]
        for slot, resume in zip(slots.tolist(), resumes, strict=True):
            base = config.capacity * L.STATE_WIDTH + slot * config.window
            scores = np.asarray(resume.unsent_logprobs, np.float32).view(np.int32)
            for start, cursor, items in (
                (base, resume.token_cursor, resume.unsent_tokens),
                (base + config.capacity * config.window, resume.logprob_cursor, scores),
            ):
                if len(items):
                    index.append(start + np.arange(cursor, cursor + len(items)) % config.window)
                    values.append(np.asarray(items, np.int32))
        self._write(np.concatenate([part.ravel() for part in index]), np.concatenate([part.ravel() for part in values]))

    def end(self, slots: NDArray[np.int64]) -> None:
        """End handles in stream order: launches enqueued from now on find no live slot."""
        flags = slots * L.STATE_WIDTH + L.FLAGS
        self._write(flags, np.zeros(len(slots), np.int32))

    def state_row(self, slot: int) -> NDArray[np.int32]:
        """Copy of a slot's state, int32 `[STATE_WIDTH]`; waits for all launches (retraction only)."""
        return self.arena[slot * L.STATE_WIDTH : (slot + 1) * L.STATE_WIDTH].cpu().numpy()

    def unsent(self, slot: int, begin: int, end: int, *, logprobs: bool = False) -> NDArray[np.int32]:
        """Copy of the ring's output items [begin, end), int32; waits for all launches (retraction only)."""
        config = self.config
        ring = config.capacity * L.STATE_WIDTH + (config.capacity * config.window if logprobs else 0)
        start = ring + slot * config.window
        items: NDArray[np.int32] = self.arena[start : start + config.window].cpu().numpy()
        return items[np.arange(begin, end) % config.window]

    # --- steps ------------------------------------------------------------------------------------

    def step(
        self,
        handles: Any,
        token_ids: Any,
        accept_lens: Any,
        logprobs: Any,
        control: NDArray[np.int32] | None,
        mode: int,
    ) -> DeviceStep:
        """Launch a step on the current stream; see Packer.step.

        No synchronisation and no device allocation as long as token ids and logprobs are on the device;
        those on the host are copied there first. Handles and lengths on the host are read where they are staged.
        """
        from gpupack.kernels.pack import pack_kernel

        if not self._free:
            raise BufferBusyError(
                f"step: all {self.config.buffers} packed steps are in use; release an earlier one first"
            )
        buffer = self._free[-1]
        batch = len(handles)
        if batch > self.config.batch_capacity:
            raise InputError(f"handles: expected at most max_batch = {self.config.batch_capacity} rows, got {batch}")
        handles = self._input("handles", handles, torch.int64, (1,), batch, buffer.handles)
        lens = self._ones[:batch] if accept_lens is None else accept_lens
        lens = self._input("accept_lens", lens, torch.int32, (1,), batch, buffer.accept_lens)
        token_ids = handles if token_ids is None else self._input("token_ids", token_ids, None, (1, 2), batch)
        scores = self._ones if logprobs is None else self._input("logprobs", logprobs, torch.float32, (1, 2), batch)
        self._write_control(buffer, batch, mode, token_ids, scores if logprobs is not None else None, control)
        self._free.pop()
        self._launch = self._launch % (2**31 - 1) + 1
        score_bits = scores if scores.dtype == torch.int32 else scores.view(torch.int32)
        self.runtime.launch(
            pack_kernel,
            max(-(-batch // self.shape.block), 1),
            (self.arena, handles, token_ids, lens, score_bits, buffer.control, buffer.out, self.scan),
            self._constants,
            self.shape.warps,
        )
        layout = L.packed_layout(batch, self.config.max_items, self.config.logprobs)
        with_logprobs = self.config.logprobs and bool(mode & L.MODE_LOGPROBS)
        return DeviceStep(self, buffer, self.runtime.record(), self._launch, layout, with_logprobs)

    def give_back(self, buffer: _Buffer) -> None:
        """A reader is done with a buffer."""
        self._free.append(buffer)

    def _write_control(
        self,
        buffer: _Buffer,
        batch: int,
        mode: int,
        token_ids: Tensor,
        logprobs: Tensor | None,
        control: NDArray[np.int32] | None,
    ) -> None:
        words = buffer.control_words
        words[L.LAUNCH_BATCH] = batch
        words[L.LAUNCH_MODE] = mode
        words[L.LAUNCH_TOKEN_STRIDE] = token_ids.stride(0)
        words[L.LAUNCH_LOGPROB_STRIDE] = 0 if logprobs is None else logprobs.stride(0)
        words[L.LAUNCH_CONTROLLED] = control is not None
        words[L.LAUNCH_HAS_LOGPROBS] = logprobs is not None
        widths = [array.shape[1] if array.ndim == 2 else 1 for array in (token_ids, logprobs) if array is not None]
        words[L.LAUNCH_MAX_ACCEPT] = min(self.config.max_accept, *widths)
        if control is not None:
            if control.shape[1] != batch:
                raise InputError(f"control: expected {batch} rows, one for each handle, got {control.shape[1]}")
            words[L.LAUNCH_WORDS : L.LAUNCH_WORDS + control.size] = control.ravel()

    def _input(
        self,
        name: str,
        value: Any,
        dtype: torch.dtype | None,
        ndim: tuple[int, ...],
        batch: int | None,
        staging: Tensor | None = None,
    ) -> Tensor:
        """An input the kernel can read: a device tensor as it is, a host array through the ring's memory."""
        if isinstance(value, Tensor) and value.device == self.runtime.device and value.device.type != "cpu":
            dtypes = (torch.int64, torch.int32) if dtype is None else (dtype,)
            if value.dtype not in dtypes or value.ndim not in ndim:
                raise InputError(
                    f"{name}: expected dtype {dtypes} and {ndim} dimensions, got {value.dtype}, {value.shape}"
                )
            if value.stride(-1) != 1:
                raise InputError(f"{name}: expected the last dimension to be contiguous, got strides {value.stride()}")
            if batch is not None and value.shape[0] != batch:
                raise InputError(f"{name}: expected {batch} rows, one for each handle, got shape {tuple(value.shape)}")
            return value
        kinds = _HOST_DTYPES[name]
        array = host_array(name, value, kinds, ndim)
        if batch is not None:
            check_rows(name, array, batch)
        if staging is not None:  # saturated, so that no bad length wraps to a good one
            words: NDArray[Any] = staging.numpy()
            limits = np.iinfo(words.dtype)
            np.clip(array, limits.min, limits.max, out=words[: len(array)], casting="unsafe")
            return staging
        return torch.from_numpy(array).to(self.runtime.device, non_blocking=True)

    def _write(self, index: NDArray[np.int64], values: NDArray[np.int32]) -> None:
        """Write arena words in stream order, from staging memory that is kept until the copy has run."""
        while self._staging and self._staging[0][0].query():
            self._staging.popleft()
        staged_index = self.runtime.host(len(index), torch.int64)
        staged_values = self.runtime.host(len(values), torch.int32)
        staged_index.numpy()[:] = index
        staged_values.numpy()[:] = values
        device = self.runtime.device
        self.arena[staged_index.to(device, non_blocking=True)] = staged_values.to(device, non_blocking=True)
        self._staging.append((self.runtime.record(), [staged_index, staged_values]))


_HOST_DTYPES: dict[str, tuple[type[np.generic], ...]] = {
    "handles": (np.int64,),
    "token_ids": (np.int64, np.int32),
    "accept_lens": (np.int32, np.int64),
    "logprobs": (np.float32,),
}
