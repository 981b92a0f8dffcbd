"""OpenRequests: the requests of one stream that a receiver knows, by slot, and where each of them stands."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.transport.received import RequestRecord
from gpupack.transport.score_ids import ScoreIds
from gpupack.wire.frame import Int32
from gpupack.wire.metadata import OpeningRecord, RowExtras

SLOT_MASK = (1 << L.SLOT_BITS) - 1


class Standing(NamedTuple):
    """Where a request stands: its tokens that came since its output was last dropped, and how often that was."""

    tokens: int
    restarts: int


_NOWHERE = Standing(-1, 0)  # no opening record resumes there


class OpenRequests:
    """Requests that are open, suspended or lost; nothing is checked here, that is StreamTable's part.

    Memory is bounded by `max_slots`, whatever the frames say; the receiver may change it between frames.
    `received` and `restarts` are int64 by slot: tokens of the request so far, and how often its output was
    dropped. `records` holds a RequestRecord by slot. `lost` says by rid what came of requests of earlier
    streams that did not come back whole.
    """

    def __init__(self, max_slots: int, lost: dict[str, Standing]) -> None:
        self.max_slots = max_slots
        self.lost = lost
        self.received = np.zeros(0, np.int64)
        self.restarts = np.zeros(0, np.int64)
        self.records = np.empty(0, np.object_)
        self.with_families = False  # a request has asked for top-k or token-ids logprobs
        self.scored = np.zeros(0, np.bool_)  # by slot: the request returns logprobs
        self.with_scores = False  # a request has asked for that
        self.score_ids = ScoreIds()
        self._widths = np.zeros(0, np.int64)  # by slot: words of a position's record in `families`
        self._generation = np.zeros(0, np.int32)  # by slot; 0: not open
        self._slots: dict[str, int] = {}  # open rids
        self._suspended: dict[str, Standing] = {}  # by rid, of handles that ended and may come back

    def __len__(self) -> int:
        """Slots that memory is held for."""
        return len(self._generation)

    # --- what is known ----------------------------------------------------------------------------

    def at(self, slot: Int32) -> tuple[Int32, NDArray[np.int64]]:
        """Copies of generation (0: not open) and tokens so far, of slots that may be beyond the memory held."""
        if int(slot.max()) < len(self):
            return self._generation[slot], self.received[slot]
        inside = np.minimum(slot, len(self))
        return np.append(self._generation, np.int32(0))[inside], np.append(self.received, 0)[inside]

    def widths_at(self, slot: Int32) -> NDArray[np.int64]:
        """Copy of the widths of family records, of slots that may be beyond the memory held."""
        if int(slot.max()) < len(self):
            return self._widths[slot]
        return np.append(self._widths, 0)[np.minimum(slot, len(self))]

    def slot_of(self, rid: str) -> int | None:
        """The slot under which a rid is open."""
        return self._slots.get(rid)

    def standing(self, rid: str) -> Standing | None:
        """Where a request stands that is open or suspended on this stream."""
        slot = self._slots.get(rid)
        return self._suspended.get(rid) if slot is None else self._standing_at(slot)

    def unfinished(self) -> dict[str, Standing]:
        """What came by rid, of all requests without a final row; those long lost may be left out."""
        open_now = {rid: self._standing_at(slot) for rid, slot in self._slots.items()}
        # What is lost comes last: it says what came, the others may count what did not.
        return _newest({**self._suspended, **open_now, **self.lost}, self.max_slots)

    # --- what changes -----------------------------------------------------------------------------

    def reserve(self, slots: int) -> None:
        """Hold memory for slots below `slots`."""
        size = len(self._generation)
        if slots > size:
            size = min(max(slots, 2 * size, 64), self.max_slots)
            self._generation = _grown(self._generation, size)
            self.received = _grown(self.received, size)
            self.restarts = _grown(self.restarts, size)
            self._widths = _grown(self._widths, size)
            self.scored = _grown(self.scored, size)
            self.records = _grown(self.records, size)

    def open(self, opening: OpeningRecord, slot: int, generation: int) -> None:
        """Begin a handle; memory for its slot is held."""
        if self._generation[slot]:  # the risen generation says that the handle before has ended
            self.suspend(int(self._generation[slot]) << L.SLOT_BITS | slot)
        if opening.resumed and opening.rid in self._slots:
            self.close(self._slots[opening.rid])
        self._suspended.pop(opening.rid, None)
        self.lost.pop(opening.rid, None)
        self._slots[opening.rid] = slot
        self._generation[slot] = generation
        self.restarts[slot] = opening.restarts
        self._widths[slot] = opening.family_width
        self.with_families |= opening.family_width > 0
        self.scored[slot] = opening.return_logprob
        self.with_scores |= opening.return_logprob
        if not opening.resumed:
            self.score_ids.forget(opening.rid)
        self.records[slot] = RequestRecord.of(opening)

    def restart(self, slot: int) -> None:
        """The request of a slot starts over: what came of it is void."""
        self.restarts[slot] += 1
        self.lost.pop(self.records[slot].rid, None)
        self.score_ids.forget(self.records[slot].rid)

    def tell(self, slot: int, extra: RowExtras) -> None:
        """Keep what a row tells of its request for later rows; records that were given out stay as they are."""
        self.records[slot] = self.records[slot].told(extra)

    def leave_hole(self, rid: str) -> None:
        """A request goes on behind what never came; it stays lost until it ends or restarts."""
        self.lost[rid] = _NOWHERE

    def close(self, slot: int) -> None:
        """End the request that is open in a slot."""
        rid = self.records[slot].rid
        self._generation[slot] = 0
        self.records[slot] = None
        if self._slots.get(rid) == slot:  # else the rid has been opened again under another handle
            del self._slots[rid]
            self.lost.pop(rid, None)

    def finish(self, slot: int) -> None:
        """End the request that is open in a slot, with its final row."""
        self.score_ids.forget(self.records[slot].rid)
        self.close(slot)

    def drop(self, handles: list[int]) -> list[str]:
        """End handles whose requests will not come back; their rids, under which others may go on."""
        rids = []
        for handle in handles:
            if self._is_open(handle):
                slot = handle & SLOT_MASK
                rids.append(self.records[slot].rid)
                self.finish(slot)
        return rids

    def suspend(self, handle: int) -> None:
        """End a handle whose request may come back."""
        if not self._is_open(handle):
            return
        slot = handle & SLOT_MASK
        rid = self.records[slot].rid
        if self._slots.get(rid) == slot:
            self._suspended.pop(rid, None)
            self._suspended[rid] = self._standing_at(slot)
            self._suspended = _newest(self._suspended, self.max_slots)
            self.score_ids.keep_at_most(2 * self.max_slots)
        hole = self.lost.get(rid)
        self.close(slot)
        if hole is not None:
            self.lost[rid] = hole
            self.lost = _newest(self.lost, self.max_slots)

    def _is_open(self, handle: int) -> bool:
        """False for a handle that was never opened on this stream, or whose request resumed in this very frame."""
        slot = handle & SLOT_MASK
        return slot < len(self) and bool(self._generation[slot] == handle >> L.SLOT_BITS)

    def _standing_at(self, slot: int) -> Standing:
        return Standing(int(self.received[slot]), int(self.restarts[slot]))


def _grown(column: NDArray, size: int) -> NDArray:  # type: ignore[type-arg]
    out = np.zeros(size, column.dtype)
    out[: len(column)] = column
    return out


def _newest(by_rid: dict[str, Standing], most: int) -> dict[str, Standing]:
    """At most `most` entries, the newest ones."""
    excess = len(by_rid) - most
    return by_rid if excess <= 0 else dict(list(by_rid.items())[excess:])
