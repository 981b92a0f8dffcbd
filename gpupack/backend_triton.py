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
from gpupack.arena_places import ArenaPlaces
from gpupack.checks import check_rows, host_array
from gpupack.config import PackerConfig
from gpupack.device import CudaRuntime, DeviceRuntime, Event, InterpreterRuntime
from gpupack.device_inputs import INPUTS, LENS
from gpupack.errors import BufferBusyError, ConfigError, InputError, StepFailedError
from gpupack.inputs import StepInputs
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
        self.lens = {name: runtime.host(config.batch_capacity, torch.int32) for name in LENS}
        self.out_words: NDArray[np.int32] = self.out.numpy()
        self.control_words: NDArray[np.int32] = self.control.numpy()
        addresses = self.control_words[L.LAUNCH_ADDRESSES : L.LAUNCH_WORDS]
        self.addresses: NDArray[np.int64] = addresses.view(np.int64)


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
                cause = "accept_lens or other lens out of range, or too few logprobs for a request that asked"
                raise StepFailedError(
                    f"step {self.number}: the kernel reported launch {launch}, error {error} "
                    f"({cause if error == L.ERROR_INPUT else 'launch numbers differ'})"
                )
            scores = self._with_logprobs or bool(words[L.H_LOGPROBS])
            spec_width = self._backend.config.spec_width
            self._packed = PackedStep(words, self._layout, scores, self._release, spec_width=spec_width)
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
        self._arenas = ArenaPlaces(config)
        self.arena = self.runtime.zeros(self._arenas.words, torch.int32)
        self.scan = self.runtime.zeros(L.SCAN_HEADER + len(L.SCAN_AXES) * self.shape.blocks, torch.int64)
        self.scan[0] = 1
        self._ones = self.runtime.zeros(config.batch_capacity, torch.int32) + 1
        size = L.packed_layout(config.batch_capacity, config.packed_shape).size
        self._free = [_Buffer(self.runtime, config, size) for _ in range(config.buffers)]
        self._constants = kernel_constants(config, self.shape)
        self._launch = 0
        self._staging: deque[tuple[Event, list[Tensor]]] = deque()

    # --- life of a handle -------------------------------------------------------------------------

    def install(self, slots: NDArray[np.int64], rows: NDArray[np.int32], resumes: Sequence[Resume]) -> None:
        """Begin handles in stream order: write their state, and what a resumed one has not sent yet."""
        index, values = self._arenas.installed(slots, rows, resumes)
        self._write(index, values)

    def end(self, slots: NDArray[np.int64]) -> None:
        """End handles in stream order: launches enqueued from now on find no live slot."""
        flags = slots * L.STATE_WIDTH + L.FLAGS
        self._write(flags, np.zeros(len(slots), np.int32))

    def state_row(self, slot: int) -> NDArray[np.int32]:
        """Copy of a slot's state, int32 `[STATE_WIDTH]`; waits for all launches (retraction only)."""
        return self.arena[slot * L.STATE_WIDTH : (slot + 1) * L.STATE_WIDTH].cpu().numpy()

    def spec_row(self, slot: int) -> NDArray[np.int32]:
        """Copy of a slot's speculative counters, int32 `[spec_width]`; waits for all launches (retraction only)."""
        width = self.config.spec_width
        start = self._arenas.spec + slot * width
        return self.arena[start : start + width].cpu().numpy()

    def unsent(self, slot: int, begin: int, end: int, channel: int = L.CHANNEL_TOKENS) -> NDArray[np.int32]:
        """Copy of a channel's output items [begin, end), int32; waits for all launches (retraction only)."""
        start, places = self._arenas.ring(slot, channel, int(self.state_row(slot)[L.WIDTHS]))
        words = int(places.max(initial=-1)) + 1
        items: NDArray[np.int32] = self.arena[start : start + words].cpu().numpy()
        return items[places[np.arange(begin, end) % len(places)]].ravel()

    # --- steps ------------------------------------------------------------------------------------

    def step(self, handles: Any, inputs: StepInputs, control: NDArray[np.int32] | None, mode: int) -> DeviceStep:
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
        taken = self._taken(handles, inputs, batch, buffer)
        self._write_control(buffer, batch, mode, taken, control)
        self._free.pop()
        self._launch = self._launch % (2**31 - 1) + 1
        self.runtime.launch(
            pack_kernel,
            max(-(-batch // self.shape.block), 1),
            (self.arena, buffer.control, buffer.out, self.scan),
            self._constants,
            self.shape.warps,
            taken,
        )
        layout = L.packed_layout(batch, self.config.packed_shape)
        with_logprobs = self.config.logprobs and bool(mode & L.MODE_LOGPROBS)
        return DeviceStep(self, buffer, self.runtime.record(), self._launch, layout, with_logprobs)

    def give_back(self, buffer: _Buffer) -> None:
        """A reader is done with a buffer."""
        self._free.append(buffer)

    def _taken(self, handles: Any, inputs: StepInputs, batch: int, buffer: _Buffer) -> list[Tensor | None]:
        """The inputs of a launch in the order of `layout.LAUNCH_INPUTS`, where the kernel can read them."""
        config = self.config
        taken: list[Tensor | None] = [self._input("handles", handles, batch, buffer.handles)]
        lens = self._ones if inputs.accept_lens is None else inputs.accept_lens
        given = inputs._replace(accept_lens=lens[:batch] if inputs.accept_lens is None else lens)
        if not config.max_top_logprobs:
            given = given._replace(top_logprobs_val=None, top_logprobs_idx=None)
        if not config.max_token_ids_logprobs:
            given = given._replace(token_ids_logprobs_val=None)
        if not config.speculative:
            given = given._replace(block_accept_lens=None, cap_lens=None)
        for name in list(L.LAUNCH_INPUTS)[1:]:
            value = getattr(given, name)
            taken.append(None if value is None else self._input(name, value, batch, buffer.lens.get(name)))
        top_val, top_idx = taken[L.ADDRESS_TOP_VAL], taken[L.ADDRESS_TOP_IDX]
        if (top_val is None) != (top_idx is None):
            raise InputError("top_logprobs_val, top_logprobs_idx: expected both or none, got one")
        if top_val is not None and top_idx is not None and top_val.shape != top_idx.shape:
            raise InputError(f"top_logprobs_idx: expected shape {tuple(top_val.shape)}, got {tuple(top_idx.shape)}")
        return taken

    def _write_control(
        self, buffer: _Buffer, batch: int, mode: int, taken: list[Tensor | None], control: NDArray[np.int32] | None
    ) -> None:
        words = buffer.control_words
        ids, scores = taken[L.ADDRESS_TOKEN_IDS], taken[L.ADDRESS_LOGPROBS]
        top_val, top_idx, ids_val = (taken[i] for i in (L.ADDRESS_TOP_VAL, L.ADDRESS_TOP_IDX, L.ADDRESS_IDS_VAL))
        words[L.LAUNCH_BATCH] = batch
        words[L.LAUNCH_MODE] = mode
        words[L.LAUNCH_CONTROLLED] = control is not None
        words[L.LAUNCH_HAS_LOGPROBS] = scores is not None
        words[L.LAUNCH_TOP_WIDTH] = 0 if top_val is None else top_val.shape[2]
        words[L.LAUNCH_IDS_WIDTH] = 0 if ids_val is None else ids_val.shape[2]
        for field, array in ((L.LAUNCH_TOKEN_STEP, ids), (L.LAUNCH_IDX_STEP, top_idx)):
            words[field] = 2 if array is not None and array.dtype == torch.int64 else 1
        for field, array in (
            (L.LAUNCH_TOKEN_STRIDE, ids),
            (L.LAUNCH_LOGPROB_STRIDE, scores),
            (L.LAUNCH_TOP_STRIDE, top_val),
            (L.LAUNCH_TOP_IDX_STRIDE, top_idx),
            (L.LAUNCH_IDS_STRIDE, ids_val),
        ):
            words[field] = 0 if array is None else array.stride(0)
        widths = [a.shape[1] if a.ndim > 1 else 1 for a in (ids, scores, top_val, ids_val) if a is not None]
        words[L.LAUNCH_MAX_ACCEPT] = min([self.config.max_accept, *widths])
        buffer.addresses[:] = [0 if array is None else array.data_ptr() for array in taken]
        if control is not None:
            if control.shape[1] != batch:
                raise InputError(f"control: expected {batch} rows, one for each handle, got {control.shape[1]}")
            words[L.LAUNCH_WORDS : L.LAUNCH_WORDS + control.size] = control.ravel()

    def _input(self, name: str, value: Any, batch: int, staging: Tensor | None = None) -> Tensor:
        """An input the kernel can read: a device tensor as it is, a host array through the ring's memory."""
        kind = INPUTS[name]
        if isinstance(value, Tensor) and value.device == self.runtime.device and value.device.type != "cpu":
            kind.check_tensor(name, value, batch)
            tensor = value
        else:
            array = host_array(name, value, kind.host_dtypes, kind.dimensions)
            check_rows(name, array, batch)
            if staging is not None:  # saturated, so that no bad length wraps to a good one
                words: NDArray[Any] = staging.numpy()
                limits = np.iinfo(words.dtype)
                np.clip(array, limits.min, limits.max, out=words[: len(array)], casting="unsafe")
                return staging
            tensor = torch.from_numpy(array).to(self.runtime.device, non_blocking=True)
        return tensor[:, None, :] if kind.dimensions == (2, 3) and tensor.ndim == 2 else tensor

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
