"""A simulated device's memory: at every address what the device finds there, which the host can not."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

POISON_BYTE = 0x7E
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class DeviceMemory:
    """Who has which addresses, and what the device finds there."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: dict[int, tuple[NDArray[np.uint8], Tensor]] = {}  # by address: bytes, what was given out
        self._device: set[int] = set()
        self._open: list[Tensor] | None = []  # device memory that still lies where it says

    def add(self, tensor: Tensor, *, device: bool) -> Tensor:
        """Memory that the device can reach: its own, or the host's."""
        start = tensor.data_ptr()
        if tensor.numel():
            seen = tensor.numpy().reshape(-1).view(np.uint8)
            self._starts.insert(bisect_right(self._starts, start), start)
            self._regions[start] = (seen, tensor)
            if device:
                self._device.add(start)
                if self._open is None:
                    self._hide(start)
                else:
                    self._open.append(tensor)
        return tensor

    def seal(self) -> None:
        """From now on device memory is out of the host's reach."""
        tensors, self._open = self._open or [], None
        for tensor in tensors:
            self._hide(tensor.data_ptr())

    def _hide(self, start: int) -> None:
        shown, tensor = self._regions[start]
        self._regions[start] = (np.frombuffer(bytearray(shown.tobytes()), np.uint8), tensor)
        shown.fill(POISON_BYTE)

    def at(self, address: int, dtype: Any, count: int) -> NDArray[Any]:
        """`count` items of a type at an address, as the device sees them."""
        if not count:
            return np.empty(0, dtype)
        index = bisect_right(self._starts, address) - 1
        assert index >= 0, f"illegal address {address:#x}"
        start = self._starts[index]
        begin, end = address - start, address - start + count * np.dtype(dtype).itemsize
        seen = self._regions[start][0]
        assert end <= len(seen), f"illegal address {address + end:#x}"
        return seen[begin:end].view(dtype)

    def view(self, tensor: Tensor) -> NDArray[Any]:
        """A contiguous tensor as the device sees it, flat."""
        return self.at(tensor.data_ptr(), _NUMPY[tensor.dtype], tensor.numel())

    def is_device(self, tensor: Tensor) -> bool:
        """Whether a tensor is device memory."""
        index = bisect_right(self._starts, tensor.data_ptr()) - 1
        start = self._starts[index] if index >= 0 else 0
        return start in self._device and tensor.data_ptr() - start < len(self._regions[start][0])

    def check(self) -> None:
        """Nobody wrote where device memory says it is."""
        for start in self._device:
            shown = self._regions[start][1].numpy().reshape(-1).view(np.uint8)
            assert (shown == POISON_BYTE).all(), "the host wrote device memory"


_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}
