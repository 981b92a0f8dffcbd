"""SlotTable: which handle owns which slot, and which request a handle names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.errors import CapacityError, HandleError, InputError
from gpupack.core.request import Request

LAST_GENERATION = 2**31 - 1


class SlotTable:
    """Slots, generations and the requests that own them; host only, touched once a request's life.

    A handle is `(generation << 32) | slot`, int64. The generation rises when a handle ends, so an
    old handle never names a new request; a slot whose generations are used up is not given again.
    """

    def __init__(self, capacity: int) -> None:
        self.generations: NDArray[np.int64] = np.ones(capacity, np.int64)
        self.requests: list[Request | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._live = 0

    def __len__(self) -> int:
        return self._live

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        """Give a handle to each request, int64 `[n]`; CapacityError, and no change, if slots lack."""
        if len(requests) > len(self._free):
            raise CapacityError(
                f"admit: {len(requests)} requests, {len(self._free)} of {len(self.requests)} slots free"
            )
        slots = np.array([self._free.pop() for _ in requests], np.int64)
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self.requests[slot] = request
        self._live += len(slots)
        return (self.generations[slots] << L.SLOT_BITS) | slots

    def end(self, handles: NDArray[np.int64]) -> NDArray[np.int64]:
        """End handles and free their slots, int64 `[n]`; HandleError, and no change, if one is not live."""
        slots = self.slots_of(handles)
        if len(np.unique(slots)) != len(slots):
            raise InputError(f"handles: expected each handle once, got {handles.tolist()}")
        self.generations[slots] += 1
        self._live -= len(slots)
        for slot in slots.tolist():
            self.requests[slot] = None
            if self.generations[slot] < LAST_GENERATION:
                self._free.append(slot)
        return slots

    def slots_of(self, handles: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of live handles, int64 `[n]`; HandleError names the first that is not live."""
        slots = handles & ((1 << L.SLOT_BITS) - 1)
        for handle, slot in zip(handles.tolist(), slots.tolist(), strict=True):
            known = handle >= 0 and slot < len(self.requests)
            if not known or self.generations[slot] != handle >> L.SLOT_BITS or self.requests[slot] is None:
                raise HandleError(f"handle {handle} (slot {slot}, generation {handle >> L.SLOT_BITS}) is not live")
        return slots

    def request(self, handle: int) -> Request:
        """The request that a live handle names."""
        slot = int(self.slots_of(np.array([handle], np.int64))[0])
        request = self.requests[slot]
        assert request is not None
        return request

    def find(self, handle: int) -> Request | None:
        """The request that a handle names, None if the handle is not live."""
        slot = handle & ((1 << L.SLOT_BITS) - 1)
        known = handle >= 0 and slot < len(self.requests) and self.generations[slot] == handle >> L.SLOT_BITS
        return self.requests[slot] if known else None

    def live_handles(self) -> NDArray[np.int64]:
        """All live handles, int64 `[n]`, by slot."""
        slots = np.array([slot for slot, request in enumerate(self.requests) if request is not None], np.int64)
        return (self.generations[slots] << L.SLOT_BITS) | slots
