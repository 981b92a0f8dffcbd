"""What kinds of tensors a launch takes in, by the names of `layout.LAUNCH_INPUTS`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpupack.core.errors import InputError

LENS = ("accept_lens", "block_accept_lens", "cap_lens")  # one number a row; on the host they are staged


class InputKind(NamedTuple):
    """Types and dimensions of an input on the device, and types on the host."""

    dtypes: tuple[torch.dtype, ...]
    host_dtypes: tuple[type[np.generic], ...]
    dimensions: tuple[int, ...]

    def check_tensor(self, name: str, value: Tensor, batch: int) -> None:
        """Raise InputError unless the kernel can read a device tensor as it lies."""
        if value.dtype not in self.dtypes or value.ndim not in self.dimensions:
            raise InputError(
                f"{name}: expected dtype {self.dtypes} and {self.dimensions} dimensions, got {value.dtype}, "
                f"{tuple(value.shape)}"
            )
        gaps = value.stride(-1) != 1 and value.shape[-1] > 1  # the stride of a single entry says nothing
        if gaps or (value.ndim == 3 and value.shape[1] > 1 and value.stride(1) != value.shape[2]):
            raise InputError(f"{name}: expected rows to be contiguous, got strides {value.stride()}")
        if value.shape[0] != batch:
            raise InputError(f"{name}: expected {batch} rows, one for each handle, got shape {tuple(value.shape)}")


_IDS = ((torch.int64, torch.int32), (np.int64, np.int32))
_VALUES = ((torch.float32,), (np.float32,))
_LENS = ((torch.int32,), (np.int32, np.int64))
INPUTS = {
    "handles": InputKind((torch.int64,), (np.int64,), (1,)),
    "token_ids": InputKind(*_IDS, (1, 2)),
    "accept_lens": InputKind(*_LENS, (1,)),
    "logprobs": InputKind(*_VALUES, (1, 2)),
    "top_logprobs_val": InputKind(*_VALUES, (2, 3)),
    "top_logprobs_idx": InputKind(*_IDS, (2, 3)),
    "token_ids_logprobs_val": InputKind(*_VALUES, (2, 3)),
    "block_accept_lens": InputKind(*_LENS, (1,)),
    "cap_lens": InputKind(*_LENS, (1,)),
}
