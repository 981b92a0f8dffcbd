"""What the host writes for a launch: launch words, addresses of the inputs, control rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpupack.backends.cuda.buffer_ring import RingBuffer
from gpupack.backends.cuda.device_inputs import INPUTS
from gpupack.backends.cuda.runtime import DeviceRuntime
from gpupack.core import layout as L
from gpupack.core.array_checks import check_rows, host_array
from gpupack.core.config import PackerConfig
from gpupack.core.errors import InputError
from gpupack.core.row_control import check_control
from gpupack.core.step_inputs import StepInputs


class LaunchWriter:
    """Checks the inputs of a launch and writes its control block; nothing is changed if it raises InputError."""

    def __init__(self, config: PackerConfig, runtime: DeviceRuntime) -> None:
        self.config = config
        self.runtime = runtime
        self._ones = runtime.zeros(config.batch_capacity, torch.int32).add_(1)

    def write(
        self,
        buffer: RingBuffer,
        handles: Any,
        inputs: StepInputs,
        control: NDArray[np.int32] | None,
        mode: int,
        number: int,
    ) -> list[Tensor | None]:
        """Write a launch; the inputs in the order of `layout.LAUNCH_INPUTS`, where the kernel can read them.

        Device tensors are read where they are, when the launch runs. Handles and lengths on the host are staged
        in the ring; other host arrays are copied to the device, which allocates.
        """
        if not isinstance(handles, (np.ndarray, Tensor)) or handles.ndim != 1:
            got = getattr(handles, "shape", type(handles).__name__)
            raise InputError(f"handles: expected an array or tensor of 1 dimension, got {got}")
        batch = len(handles)
        if batch > self.config.batch_capacity:
            raise InputError(f"handles: expected at most max_batch = {self.config.batch_capacity} rows, got {batch}")
        if control is not None and control.shape[1] != batch:
            raise InputError(f"control: expected {batch} rows, one for each handle, got {control.shape[1]}")
        if control is not None:
            check_control(control)
        taken = self._taken(buffer, handles, inputs, batch)
        self._write_words(buffer.control, batch, mode, taken, control)
        buffer.control[L.LAUNCH_NUMBER] = number
        buffer.addresses[:] = [0 if array is None else array.data_ptr() for array in taken]
        return taken

    def _taken(self, buffer: RingBuffer, handles: Any, inputs: StepInputs, batch: int) -> list[Tensor | None]:
        config = self.config
        given = inputs
        if not config.max_top_logprobs:
            given = given._replace(top_logprobs_val=None, top_logprobs_idx=None)
        if not config.max_token_ids_logprobs:
            given = given._replace(token_ids_logprobs_val=None)
        if not config.speculative:
            given = given._replace(block_accept_lens=None, cap_lens=None)
        taken: list[Tensor | None] = [self._input("handles", handles, batch, buffer.handles)]
        for name in list(L.LAUNCH_INPUTS)[1:]:
            value = getattr(given, name)
            taken.append(None if value is None else self._input(name, value, batch, buffer.lens.get(name)))
        if taken[L.ADDRESS_ACCEPT_LENS] is None:
            taken[L.ADDRESS_ACCEPT_LENS] = self._ones
        top_val, top_idx = taken[L.ADDRESS_TOP_VAL], taken[L.ADDRESS_TOP_IDX]
        if (top_val is None) != (top_idx is None):
            raise InputError("top_logprobs_val, top_logprobs_idx: expected both or none, got one")
        if top_val is not None and top_idx is not None and top_val.shape != top_idx.shape:
            raise InputError(f"top_logprobs_idx: expected shape {tuple(top_val.shape)}, got {tuple(top_idx.shape)}")
        return taken

    def _write_words(
        self,
        words: NDArray[np.int32],
        batch: int,
        mode: int,
        taken: list[Tensor | None],
        control: NDArray[np.int32] | None,
    ) -> None:
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
        if control is not None:
            words[L.LAUNCH_WORDS : L.LAUNCH_WORDS + control.size] = control.ravel()

    def _input(self, name: str, value: Any, batch: int, staging: Tensor | None = None) -> Tensor:
        """An input the kernel can read: a device tensor as it is, a host array through the ring's memory."""
        kind = INPUTS[name]
        if isinstance(value, Tensor) and self.runtime.reaches(value):
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
            tensor = self.runtime.upload(torch.from_numpy(array))
        return tensor[:, None, :] if kind.dimensions == (2, 3) and tensor.ndim == 2 else tensor
