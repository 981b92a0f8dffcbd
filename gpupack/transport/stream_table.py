"""StreamTable: what a receiver knows of the open requests of one stream (docs/wire.md, second part of the checks)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.errors import FrameGapError, FrameValueError, StreamBrokenError, UnknownHandleError
from gpupack.transport.request_table import SLOT_MASK, OpenRequests, Standing
from gpupack.transport.score_ids import Ids
from gpupack.wire.frame import Frame, KnownRows
from gpupack.wire.metadata import OpeningRecord, SideRecord

_NO_SIDE = SideRecord()


@dataclass
class Changes:
    """What a frame that passed all checks does to a table."""

    after: NDArray[np.int64]  # tokens of each row's request, its delta included; int64 [rows]
    openings: list[OpeningRecord]
    incomplete: list[str] = field(default_factory=list)  # rids that resume behind what never came
    restarted: list[int] = field(default_factory=list)  # slots whose row restarts and does not open


class Applied(NamedTuple):
    """What a frame that was taken in means: the record of every row, object `[rows]`; rids that end with it.

    `score_ids` are the ids of logprobs, by row, where they are not those of the row's tokens.
    """

    records: NDArray[np.object_]
    dropped: tuple[str, ...]
    score_ids: dict[int, Ids]


class StreamTable:
    """The frames of one stream in their order; `check` changes nothing, `apply` cannot fail.

    `predecessor` is the stream that this one replaces: what it left unfinished counts as lost.
    """

    def __init__(self, stream_id: int, dp_rank: int, max_slots: int, predecessor: StreamTable | None) -> None:
        self.stream_id = stream_id
        self.dp_rank = dp_rank
        self.next_frame_no = 0
        self.broken = False
        self.known: KnownRows | None = None  # rows of the newest frame, if all of them are open still
        self._known_tokens = np.empty(0, np.int64)
        self._known_records = np.empty(0, np.object_)
        self._unsettled = False  # `requests.received` is behind what is known of these rows
        lost: dict[str, Standing] = {}
        if predecessor is not None:
            predecessor._settle()
            lost = predecessor.requests.unfinished()
        self.requests: OpenRequests = OpenRequests(max_slots, lost)

    def __str__(self) -> str:
        return f"stream {self.stream_id:#x} of dp rank {self.dp_rank}"

    def check(self, frame: Frame) -> Changes:
        """Check a verified frame against the table, without changing it.

        Raises StreamBrokenError, FrameGapError, UnknownHandleError or FrameValueError.
        """
        if self.broken:
            raise StreamBrokenError(f"{self} was given up; the sender must reopen")
        if frame.dp_rank != self.dp_rank:
            raise FrameValueError(f"{self}: expected that rank, got {frame.dp_rank}")
        if frame.frame_no != self.next_frame_no:
            raise FrameGapError(f"{self}: expected frame {self.next_frame_no}, got {frame.frame_no}")
        changes = Changes(np.empty(0, np.int64), frame.side.openings if frame.side is not None else [])
        if self.known is not None and frame.slot is self.known.slot and not changes.openings:
            before = self._known_tokens.copy()  # the rows of the frame before, all of them open still
        else:
            self._settle()
            before = self._check_handles(frame, changes.openings) if frame.rows else changes.after
        if frame.rows:
            self._check_openings(frame, changes)
            self._check_lengths(frame, before, changes)
            if frame.families is not None or self.requests.with_families or changes.openings:
                self._check_families(frame, changes)
        return changes

    def _check_handles(self, frame: Frame, openings: list[OpeningRecord]) -> NDArray[np.int64]:
        """Check that rows are open or open now; tokens before each row as the table has them, int64 `[rows]`."""
        slot, highest = frame.slot, int(frame.slot.max())
        if highest >= self.requests.max_slots:
            raise FrameValueError(f"{self}: expected slots below {self.requests.max_slots}, got {highest}")
        generation, before = self.requests.at(slot)
        unknown = generation != frame.generation
        if openings:
            opens = [opening.row for opening in openings]
            old = frame.generation[opens] <= generation[opens]
            if np.count_nonzero(old):
                row = opens[int(old.argmax())]
                raise FrameValueError(
                    f"{self}: expected slot {slot[row]} to open with a generation above {generation[row]}, got "
                    f"{frame.generation[row]} in row {row}"
                )
            unknown[opens] = False
        if np.count_nonzero(unknown):
            row = int(unknown.argmax())
            raise UnknownHandleError(
                f"{self}: expected row {row} to be of an open request, got slot {slot[row]} generation "
                f"{frame.generation[row]}, where generation {generation[row]} is open (0: none)"
            )
        return before

    def _check_openings(self, frame: Frame, changes: Changes) -> None:
        """Compare each request that opens with what came of it before."""
        opened: set[str] = set()
        for opening in changes.openings:
            if opening.resumed:
                if opening.rid in opened:
                    raise FrameValueError(f"{self}: {opening.rid!r} opens and resumes in one frame")
                self._check_resumed(frame, opening, changes)
            elif opening.tokens_before:
                raise FrameGapError(
                    f"{self}: expected {opening.rid!r}, which does not resume, to open at token 0, got "
                    f"{opening.tokens_before}"
                )
            opened.add(opening.rid)

    def _check_resumed(self, frame: Frame, opening: OpeningRecord, changes: Changes) -> None:
        slot = self.requests.slot_of(opening.rid)
        if slot is not None:
            held = frame.flags[frame.slot == slot]
            if np.count_nonzero(held & L.ROW_OPENING) != len(held):
                raise FrameValueError(f"{self}: {opening.rid!r} resumes in a frame with a row of its old handle")
        if frame.flags[opening.row] & L.ROW_RESTARTED:
            return
        here = self.requests.standing(opening.rid)
        there = Standing(opening.tokens_before, opening.restarts)
        if here is None:
            came = self.requests.lost.get(opening.rid)
            whole = came == there if came is not None else not there.tokens
        elif here != there:
            raise FrameGapError(
                f"{self}: expected {opening.rid!r} to resume at token {here.tokens} after {here.restarts} restarts, "
                f"got {there.tokens} after {there.restarts}"
            )
        else:
            whole = opening.rid not in self.requests.lost
        if not whole:
            changes.incomplete.append(opening.rid)

    def _check_lengths(self, frame: Frame, before: NDArray[np.int64], changes: Changes) -> None:
        """Check that every row continues where its request stood."""
        if changes.openings:
            before[[opening.row for opening in changes.openings]] = [o.tokens_before for o in changes.openings]
        if np.bitwise_or.reduce(frame.flags) & L.ROW_RESTARTED:
            restarted = frame.flags & L.ROW_RESTARTED
            before[restarted != 0] = 0
            changes.restarted = frame.slot[(restarted != 0) & ((frame.flags & L.ROW_OPENING) == 0)].tolist()
        changes.after = before + (frame.token_indptr[1:] - frame.token_indptr[:-1])
        wrong = frame.visible_len != changes.after
        if np.count_nonzero(wrong):
            hidden = (frame.flags & L.ROW_HIDDEN_TOKEN) != 0
            changes.after[hidden] = before[hidden]  # the token of such a row is not output
            # An output that was cut behind what was sent: nothing comes, and less counts than was sent.
            wrong &= (changes.after != before) | (frame.visible_len > before)
            if np.count_nonzero(wrong):
                row = int(wrong.argmax())
                raise FrameGapError(
                    f"{self}: expected row {row} (slot {frame.slot[row]}) to lead from {before[row]} tokens to "
                    f"{changes.after[row]}, got visible_len {frame.visible_len[row]}"
                )

    def _check_families(self, frame: Frame, changes: Changes) -> None:
        """Check that every logprob has a record of the width that its request asked for, and no other row has any."""
        widths = self.requests.widths_at(frame.slot)
        for opening in changes.openings:
            widths[opening.row] = opening.family_width
        scores = 0 if frame.logprob_indptr is None else np.diff(frame.logprob_indptr)
        words = 0 if frame.families_indptr is None else np.diff(frame.families_indptr)
        wrong = scores * widths != words
        if np.count_nonzero(wrong):
            row = int(np.broadcast_to(wrong, widths.shape).argmax())
            raise FrameValueError(
                f"{self}: families: expected records of {widths[row]} words for the logprobs of row {row}, got others"
            )

    def apply(self, frame: Frame, changes: Changes) -> Applied:
        """Take in a frame that `check` let pass."""
        self.next_frame_no += 1
        requests = self.requests
        side = frame.side if frame.side is not None else _NO_SIDE
        dropped: list[str] = []
        if changes.openings:
            requests.reserve(int(frame.slot.max()) + 1)
            # First those whose slot is taken again: an opening there would keep them as ones that may come back.
            taken = {int(frame.slot[opening.row]) for opening in changes.openings}
            dropped += requests.drop([handle for handle in side.dropped if handle & SLOT_MASK in taken])
            for opening in changes.openings:
                requests.open(opening, int(frame.slot[opening.row]), int(frame.generation[opening.row]))
            for rid in changes.incomplete:
                requests.leave_hole(rid)
        for slot in changes.restarted:
            requests.restart(slot)
        for extra in side.extras:
            requests.tell(int(frame.slot[extra.row]), extra)
        score_ids = self._note_scores(frame, changes) if requests.with_scores else {}
        same = self.known is not None and frame.slot is self.known.slot
        quiet = frame.side is None and frame.match is None and not changes.restarted
        records = self._known_records if same and quiet else requests.records[frame.slot]
        self._note_rows(frame, changes, records if quiet else None, same=same)
        if frame.match is not None:
            for slot in frame.slot[(frame.flags & L.ROW_FINAL) != 0].tolist():
                requests.finish(slot)
        dropped += requests.drop(side.dropped)
        for handle in side.ended:
            requests.suspend(handle)
        return Applied(records, tuple(rid for rid in dropped if requests.standing(rid) is None), score_ids)

    def _note_rows(self, frame: Frame, changes: Changes, records: NDArray[np.object_] | None, *, same: bool) -> None:
        """Remember the rows of a frame that changed nothing but how far its requests are; None: it did."""
        if records is None or not frame.rows:
            self.known = None
            self.requests.received[frame.slot] = changes.after
            return
        if not same:
            self.known = KnownRows.of(frame)
        self._known_tokens, self._known_records = changes.after, records
        self._unsettled = True

    def _settle(self) -> None:
        """Tell the requests how far they are, which is not done while frame after frame has the same rows."""
        if self._unsettled and self.known is not None:
            self.requests.received[self.known.slot] = self._known_tokens
        self._unsettled = False

    def _note_scores(self, frame: Frame, changes: Changes) -> dict[int, Ids]:
        """Ids of logprobs that are not those of their row's tokens, by row."""
        if frame.logprob_indptr is not None and frame.token_indptr.tobytes() == frame.logprob_indptr.tobytes():
            return {}
        tokens = np.diff(frame.token_indptr)
        scores = 0 if frame.logprob_indptr is None else np.diff(frame.logprob_indptr)
        requests = self.requests
        rows = np.flatnonzero(requests.scored[frame.slot] & (tokens != scores))
        if not len(rows):
            return {}
        restarted = (frame.flags[rows] & L.ROW_RESTARTED) != 0
        records = requests.records[frame.slot[rows]]
        for record in records[restarted]:
            requests.score_ids.forget(record.rid)
        before = np.where(restarted, 0, changes.after[rows] - tokens[rows])
        return requests.score_ids.note(frame, rows, [record.rid for record in records], before.tolist())
