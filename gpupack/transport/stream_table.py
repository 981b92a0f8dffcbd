"""StreamTable: what a receiver knows of the open requests of one stream (docs/wire.md, second part of the checks)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.errors import FrameGapError, FrameValueError, StreamBrokenError, UnknownHandleError
from gpupack.transport.received import RequestRecord
from gpupack.wire.frame import Frame
from gpupack.wire.side import OpeningRecord

SLOT_MASK = (1 << L.SLOT_BITS) - 1


@dataclass
class Changes:
    """What a frame that passed all checks does to a table."""

    after: NDArray[np.int64]  # tokens of each row's request, its delta included; int64 [rows]
    openings: list[OpeningRecord]
    incomplete: list[str] = field(default_factory=list)  # rids that resume behind tokens that never came


class StreamTable:
    """Open requests of one stream by slot; `check` changes nothing, `apply` cannot fail.

    Memory is bounded by `max_slots`, whatever the frames say; the receiver may change it between frames.
    """

    def __init__(self, stream_id: int, dp_rank: int, max_slots: int, predecessor: StreamTable | None) -> None:
        self.stream_id = stream_id
        self.dp_rank = dp_rank
        self.next_frame_no = 0
        self.broken = False
        self.max_slots = max_slots
        self._generation = np.zeros(0, np.int32)  # by slot; 0: not open
        self._received = np.zeros(0, np.int64)  # by slot: tokens of the request so far
        self._requests = np.empty(0, np.object_)  # by slot: RequestRecord
        self._slots: dict[str, int] = {}  # open rids
        self._suspended: dict[str, int] = {}  # rid: tokens, of handles that ended without a final row
        # rid: tokens that came, of requests of earlier streams that did not come back whole.
        self.lost: dict[str, int] = predecessor.unfinished() if predecessor is not None else {}

    @property
    def slots(self) -> int:
        """Slots that memory is held for."""
        return len(self._generation)

    def unfinished(self) -> dict[str, int]:
        """Tokens received by rid, of all requests without a final row; those long lost may be left out."""
        open_now = {rid: int(self._received[slot]) for rid, slot in self._slots.items()}
        # What is lost comes last: its count is what came, the others' may count what did not.
        return _newest({**self._suspended, **open_now, **self.lost}, self.max_slots)

    def check(self, frame: Frame) -> Changes:
        """Check a verified frame against the table, without changing it.

        Raises StreamBrokenError, FrameGapError, UnknownHandleError or FrameValueError.
        """
        stream = f"stream {self.stream_id:#x} of dp rank {self.dp_rank}"
        if self.broken:
            raise StreamBrokenError(f"{stream} was given up; the sender must reopen")
        if frame.dp_rank != self.dp_rank:
            raise FrameValueError(f"{stream}: expected that rank, got {frame.dp_rank}")
        if frame.frame_no != self.next_frame_no:
            raise FrameGapError(f"{stream}: expected frame {self.next_frame_no}, got {frame.frame_no}")
        changes = Changes(np.empty(0, np.int64), frame.side.openings if frame.side is not None else [])
        if frame.rows:
            before = self._check_handles(stream, frame, changes.openings)
            self._check_openings(stream, frame, changes)
            self._check_lengths(stream, frame, before, changes)
        return changes

    def _check_handles(self, stream: str, frame: Frame, openings: list[OpeningRecord]) -> NDArray[np.int64]:
        """Check that rows are open or open now; tokens before each row as the table has them, int64 `[rows]`."""
        slot, highest = frame.slot, int(frame.slot.max())
        if highest >= self.max_slots:
            raise FrameValueError(f"{stream}: expected slots below {self.max_slots}, got {highest}")
        if highest < len(self._generation):
            generation, before = self._generation[slot], self._received[slot]
        else:
            inside = np.minimum(slot, len(self._generation))
            generation = np.append(self._generation, np.int32(0))[inside]
            before = np.append(self._received, 0)[inside]
        unknown = generation != frame.generation
        if openings:
            opens = [opening.row for opening in openings]
            old = frame.generation[opens] <= generation[opens]
            if np.count_nonzero(old):
                row = opens[int(old.argmax())]
                raise FrameValueError(
                    f"{stream}: expected slot {slot[row]} to open with a generation above {generation[row]}, got "
                    f"{frame.generation[row]} in row {row}"
                )
            unknown[opens] = False
        if np.count_nonzero(unknown):
            row = int(unknown.argmax())
            raise UnknownHandleError(
                f"{stream}: expected row {row} to be of an open request, got slot {slot[row]} generation "
                f"{frame.generation[row]}, where generation {generation[row]} is open (0: none)"
            )
        return before

    def _check_openings(self, stream: str, frame: Frame, changes: Changes) -> None:
        """Compare each resumed request with what came of it before."""
        opened: set[str] = set()
        for opening in changes.openings:
            if opening.resumed:
                if opening.rid in opened:
                    raise FrameValueError(f"{stream}: {opening.rid!r} opens and resumes in one frame")
                self._check_resumed(stream, frame, opening, changes)
            opened.add(opening.rid)

    def _check_resumed(self, stream: str, frame: Frame, opening: OpeningRecord, changes: Changes) -> None:
        slot = self._slots.get(opening.rid)
        if slot is not None:
            held = frame.flags[frame.slot == slot]
            if np.count_nonzero(held & L.ROW_OPENING) != len(held):
                raise FrameValueError(f"{stream}: {opening.rid!r} resumes in a frame with a row of its old handle")
        if frame.flags[opening.row] & L.ROW_RESTARTED:
            return
        here = self._suspended.get(opening.rid) if slot is None else int(self._received[slot])
        if here is None:
            whole = self.lost.get(opening.rid, 0) == opening.tokens_before
        elif here != opening.tokens_before:
            raise FrameGapError(
                f"{stream}: expected {opening.rid!r} to resume at token {here}, got {opening.tokens_before}"
            )
        else:
            whole = opening.rid not in self.lost
        if not whole:
            changes.incomplete.append(opening.rid)

    def _check_lengths(self, stream: str, frame: Frame, before: NDArray[np.int64], changes: Changes) -> None:
        """Check that every row continues where its request stood."""
        if changes.openings:
            before[[opening.row for opening in changes.openings]] = [o.tokens_before for o in changes.openings]
        restarted = frame.flags & L.ROW_RESTARTED
        if np.count_nonzero(restarted):
            before[restarted != 0] = 0
        changes.after = before + np.diff(frame.token_indptr)
        wrong = frame.visible_len != changes.after
        if np.count_nonzero(wrong):
            # An output that was cut behind what was sent: nothing comes, and less counts than was sent.
            wrong &= (changes.after != before) | (frame.visible_len > before)
            if np.count_nonzero(wrong):
                row = int(wrong.argmax())
                raise FrameGapError(
                    f"{stream}: expected row {row} (slot {frame.slot[row]}) to lead from {before[row]} tokens to "
                    f"{changes.after[row]}, got visible_len {frame.visible_len[row]}"
                )

    def apply(self, frame: Frame, changes: Changes) -> NDArray[np.object_]:
        """Take in a frame that `check` let pass; the record of every row, object `[rows]`."""
        self.next_frame_no += 1
        if changes.openings:
            self._reserve(int(frame.slot.max()) + 1)
            for opening in changes.openings:
                self._open(opening, int(frame.slot[opening.row]), int(frame.generation[opening.row]))
            self.lost.update((rid, -1) for rid in changes.incomplete)
        elif self.lost:
            for slot in frame.slot[(frame.flags & L.ROW_RESTARTED) != 0].tolist():
                self.lost.pop(self._requests[slot].rid, None)
        self._received[frame.slot] = changes.after
        records = self._requests[frame.slot]
        if frame.match is not None:
            for slot in frame.slot[(frame.flags & L.ROW_FINAL) != 0].tolist():
                self._close(slot)
        for handle in frame.side.ended if frame.side is not None else ():
            self._suspend(handle & SLOT_MASK, handle >> L.SLOT_BITS)
        return records

    def _open(self, opening: OpeningRecord, slot: int, generation: int) -> None:
        if self._generation[slot]:  # the risen generation says that the handle before has ended
            self._suspend(slot, int(self._generation[slot]))
        if opening.resumed and opening.rid in self._slots:
            self._close(self._slots[opening.rid])
        self._suspended.pop(opening.rid, None)
        self.lost.pop(opening.rid, None)
        self._slots[opening.rid] = slot
        self._generation[slot] = generation
        self._requests[slot] = RequestRecord(opening.rid, opening.prompt_tokens, opening.cached_tokens)

    def _close(self, slot: int) -> None:
        rid = self._requests[slot].rid
        self._generation[slot] = 0
        self._requests[slot] = None
        if self._slots.get(rid) == slot:  # else the rid has been opened again under another handle
            del self._slots[rid]
            self.lost.pop(rid, None)

    def _suspend(self, slot: int, generation: int) -> None:
        if slot >= len(self._generation) or self._generation[slot] != generation:
            return  # never opened on this stream, or resumed in this very frame
        rid = self._requests[slot].rid
        if self._slots.get(rid) == slot:
            self._suspended.pop(rid, None)
            self._suspended[rid] = int(self._received[slot])
            self._suspended = _newest(self._suspended, self.max_slots)
        hole = self.lost.get(rid)
        self._close(slot)
        if hole is not None:
            self.lost[rid] = hole

    def _reserve(self, slots: int) -> None:
        size = len(self._generation)
        if slots > size:
            size = min(max(slots, 2 * size, 64), self.max_slots)
            self._generation = _grown(self._generation, size)
            self._received = _grown(self._received, size)
            self._requests = _grown(self._requests, size)


def _grown(column: NDArray, size: int) -> NDArray:  # type: ignore[type-arg]
    out = np.zeros(size, column.dtype)
    out[: len(column)] = column
    return out


def _newest(by_rid: dict[str, int], most: int) -> dict[str, int]:
    """At most `most` entries, the newest ones."""
    excess = len(by_rid) - most
    return by_rid if excess <= 0 else dict(list(by_rid.items())[excess:])
