"""Array: tensors of a side record, as bytes that are verified before anything is made of them."""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpupack.core.errors import InputError, SideRecordError

INT32_MAX = 2**31 - 1
MAX_DIMENSIONS = 32

BFLOAT16 = "bfloat16"  # NumPy has none: its bits travel, and are shown as uint16
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64",
    )
} | {BFLOAT16: np.dtype("<u2")}  # fmt: skip

Dimension = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
Shape = Annotated[list[Dimension], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array as bytes: one of `DTYPES`, shape, little-endian items in C order."""

    dtype: str
    shape: Shape
    data: bytes

    @classmethod
    def of(cls, value: Any) -> Array:
        """A copy of a NumPy array or a torch tensor on the CPU, bfloat16 included.

        InputError for anything else, a dtype that is not in `DTYPES`, and a tensor on a device, whose
        copy would be a hidden synchronisation.
        """
        if isinstance(value, cls):
            return value
        name, items = _host_items(value)
        if name not in DTYPES or items.ndim > MAX_DIMENSIONS:
            raise InputError(
                f"array: expected one of {', '.join(DTYPES)} in at most {MAX_DIMENSIONS} dimensions, got {name} "
                f"{items.shape}"
            )
        made = cls(name, list(items.shape), np.ascontiguousarray(items, DTYPES[name]).tobytes())
        if max(made.shape, default=0) > INT32_MAX or len(made.data) > INT32_MAX:
            raise InputError(f"array: expected at most {INT32_MAX} bytes and entries a dimension, got {made.shape}")
        return made

    def check(self, what: str) -> None:
        """Raise SideRecordError, which names `what`, unless dtype, shape and bytes fit each other."""
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise SideRecordError(f"{what}: expected dtype {', '.join(DTYPES)}, got {self.dtype!r}")
        # Python numbers do not overflow; NumPy refuses huge dimensions even where another one is 0.
        if math.prod(size or 1 for size in self.shape) > INT32_MAX:
            raise SideRecordError(f"{what}: expected a shape of at most {INT32_MAX} items, got {self.shape}")
        expected = math.prod(self.shape) * dtype.itemsize
        if expected != len(self.data):
            raise SideRecordError(
                f"{what}: expected {expected} bytes for {self.dtype} {self.shape}, got {len(self.data)}"
            )

    def numpy(self) -> NDArray[Any]:
        """A read-only view; of bfloat16 the bits, as uint16."""
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)

    def torch(self) -> Any:
        """A torch tensor of its own; loads torch."""
        import torch

        tensor = torch.from_numpy(self.numpy().copy())
        return tensor.view(torch.bfloat16) if self.dtype == BFLOAT16 else tensor

    def tolist(self) -> Any:
        """Nested lists of Python values; of one value, that value."""
        items = self.numpy()
        if self.dtype == BFLOAT16:  # a bfloat16 is the upper half of the float32 of the same value
            items = (items.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return items.tolist()


def _host_items(value: Any) -> tuple[str, NDArray[Any]]:
    """Name of the dtype, and the items; bfloat16 as uint16."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise InputError(f"array: expected a tensor on the CPU, got one on {value.device}")
        value = value.detach()
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES:
            return name, np.empty(tuple(value.shape), np.uint8)
        return name, (value.contiguous().view(torch.int16) if name == BFLOAT16 else value).numpy()
    if not isinstance(value, (np.ndarray, np.generic)):
        raise InputError(f"array: expected a NumPy array or a torch tensor, got {type(value).__name__}")
    items = np.asarray(value)
    name = items.dtype.name
    return name, items.view(np.uint16) if name == BFLOAT16 else items
