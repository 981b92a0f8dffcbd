"""Argument checks that name the argument, what was expected and what came."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core.errors import InputError


def host_array(name: str, value: Any, dtypes: tuple[type[np.generic], ...], ndim: tuple[int, ...]) -> NDArray[Any]:
    """`value` as a C-contiguous, aligned, writable host array of native byte order, copied only where it is not one.

    Takes NumPy arrays and CPU tensors; a tensor on a device is refused, since copying it here would
    be a hidden synchronisation.
    """
    if type(value) is not np.ndarray:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            raise InputError(f"{name}: expected an array or tensor, got {type(value).__name__}")
        if value.device.type != "cpu":
            raise InputError(f"{name}: expected a tensor on the CPU, got one on {value.device}")
        _check_dtype(name, str(value.dtype).removeprefix("torch."), dtypes)
        value = value.detach().numpy()
    if value.dtype.type not in dtypes:
        _check_dtype(name, value.dtype.name, dtypes)
    if value.ndim not in ndim:
        raise InputError(f"{name}: expected {' or '.join(map(str, ndim))} dimensions, got shape {value.shape}")
    if value.flags.carray and value.dtype.isnative:  # what compiled loops take
        return value
    return np.array(value, value.dtype.newbyteorder("="), order="C")


def _check_dtype(name: str, dtype: str, dtypes: tuple[type[np.generic], ...]) -> None:
    names = [np.dtype(each).name for each in dtypes]
    if dtype not in names:
        raise InputError(f"{name}: expected dtype {' or '.join(names)}, got {dtype}")


def check_rows(name: str, array: NDArray[Any], batch: int) -> None:
    """Raise InputError unless `array` has an entry for each of `batch` rows."""
    if array.shape[0] != batch:
        raise InputError(f"{name}: expected {batch} rows, one for each handle, got shape {array.shape}")
