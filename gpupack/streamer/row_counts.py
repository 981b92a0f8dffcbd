"""RowCounts: counts of requests by slot, and which of them no row has told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core.array_checks import check_rows, host_array
from gpupack.core.errors import InputError
from gpupack.wire.metadata import COUNTS, INT32_MAX


class RowCounts:
    """The newest counts, by name of `side.COUNTS`; `changed`, uint8 by slot, has a bit for each that is not told."""

    def __init__(self, capacity: int) -> None:
        self._newest = np.zeros((len(COUNTS), capacity), np.int32)
        self.changed = np.zeros(capacity, np.uint8)

    def admit(self, slots: NDArray[np.int64], cached_tokens: list[int]) -> None:
        """Begin slots; their opening records tell the counts."""
        self._newest[:, slots] = 0
        self._newest[0, slots] = cached_tokens
        self.changed[slots] = 0

    def all_of(self, slot: int) -> tuple[int, ...]:
        """The counts of a slot, in the order of their names."""
        return tuple(self._newest[:, slot].tolist())

    def go_on(self, slot: int, counts: Sequence[int]) -> None:
        """Put the counts that `all_of` gave before a retraction."""
        self._newest[:, slot] = counts

    def set(self, slots: NDArray[np.int64], counts: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Set counts, int32 or int64 `[n]` each or None; which slots have another one now, bool `[n]`.

        InputError, and no change, for a bad argument.
        """
        arrays = {}
        for name, value in counts.items():
            if name not in COUNTS:
                raise InputError(f"set_counts: expected {', '.join(COUNTS)}, got {name!r}")
            if value is None:
                continue
            array = host_array(name, value, (np.int32, np.int64), (1,))
            check_rows(name, array, len(slots))
            if len(array) and not 0 <= int(array.min()) <= int(array.max()) <= INT32_MAX:
                raise InputError(f"{name}: expected 0 to {INT32_MAX}, got {array.min()} to {array.max()}")
            arrays[name] = array
        any_differs = np.zeros(len(slots), np.bool_)
        for index, name in enumerate(COUNTS):
            if name not in arrays:
                continue
            differs = self._newest[index, slots] != arrays[name]
            if np.count_nonzero(differs):
                self._newest[index, slots[differs]] = arrays[name][differs]
                self.changed[slots[differs]] |= np.uint8(1 << index)
                any_differs |= differs
        return any_differs

    def opening(self, slot: int) -> dict[str, Any]:
        """The counts of a slot as fields of its opening record, which tells them; none if all are 0."""
        self.changed[slot] = 0
        counts = self._newest[:, slot].tolist()
        return dict(zip(COUNTS, counts, strict=True)) if any(counts) else {}

    def take(self, slot: int) -> dict[str, int]:
        """The counts of a slot that changed; they count as told from now on."""
        changed = int(self.changed[slot])
        self.changed[slot] = 0
        return {name: int(self._newest[i, slot]) for i, name in enumerate(COUNTS) if changed >> i & 1}
