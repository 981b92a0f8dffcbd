"""HostColumns: what rows carry beside the packed step, kept by slot until a row takes it (SPEC.md section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.array_checks import host_array
from gpupack.core.errors import InputError
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import FRESH, Request, Resume
from gpupack.packer.slots import SlotTable
from gpupack.streamer.frame_room import ROW_BYTES, Room, opening_bytes
from gpupack.streamer.pending_metadata import Kept
from gpupack.streamer.row_counts import RowCounts
from gpupack.wire.metadata import RETURNED, CachedTokensDetails, InputLogprobs, Returned

SLOT_MASK = (1 << L.SLOT_BITS) - 1


class HostColumns:
    """Columns that only the host has: attached by handle, taken by the request's next row.

    Rows of requests to which nothing is attached cost one look-up in a bool array for all of them, and
    nothing at all while no request has anything.

    Parameters
    ----------
    slots
        The packer's.
    whole_hidden_states
        Each row carries all hidden states so far, as SGLang's does; else only those not yet sent.
    disaggregated_decode
        This is the decode server of a disaggregated pair: input logprobs are the prefill server's to send.
    room
        Bytes that the fullest step leaves in a frame: opening record and waiting columns of a request fit there.

    Attributes
    ----------
    waiting
        Whether rows may have something to take.
    asking
        Live requests that asked for a column of RETURNED, so that `returned` needs the batch.
    dropped
        Rows so far of whose columns some are lost, as a frame had no room and no later row would have brought them.
    """

    def __init__(self, slots: SlotTable, *, whole_hidden_states: bool, disaggregated_decode: bool, room: int) -> None:
        capacity = len(slots.requests)
        self._slots = slots
        self._whole = whole_hidden_states
        self._no_input_logprobs = disaggregated_decode
        self.room = room
        self._kept: list[Kept | None] = [None] * capacity
        self._counts = RowCounts(capacity)
        self._asked = np.zeros(capacity, np.uint8)  # slot: a bit for each of RETURNED
        self._waiting = np.zeros(capacity, np.bool_)  # slot: its next row has something to take
        self._here = np.zeros(capacity, np.bool_)  # slot: its handle is live
        self.waiting = False
        self.asking = 0
        self.dropped = 0

    # --- life of a handle -------------------------------------------------------------------------

    def admit(self, slots: NDArray[np.int64], requests: Sequence[Request], resumes: Sequence[Resume]) -> None:
        """Begin handles; what a resumed request had kept goes on."""
        self._here[slots] = True
        self._counts.admit(slots, [request.cached_tokens for request in requests])
        self._asked[slots] = [
            request.return_hidden_states | request.return_routed_experts << 1 | request.return_indexer_topk << 2
            for request in requests
        ]
        self.asking += int(np.count_nonzero(self._asked[slots]))
        self._waiting[slots] = False
        for slot, resume in zip(slots.tolist(), resumes, strict=True):
            if resume is not FRESH:
                self._go_on(slot, resume)
        self.waiting |= bool(self._waiting[slots].any())

    def _go_on(self, slot: int, resume: Resume) -> None:
        kept = resume.kept
        if kept is not None:
            self._counts.go_on(slot, kept.counts)
            kept = replace(kept, counts=())
        elif resume.input_logprobs_sent:
            kept = Kept(input_logprobs_sent=True)
        self._kept[slot] = kept
        self._waiting[slot] = kept is not None and kept.waits()

    def end(self, slots: NDArray[np.int64]) -> None:
        """End handles, and forget what was attached to them."""
        self.asking -= int(np.count_nonzero(self._asked[slots]))
        self._asked[slots] = 0
        self._here[slots] = False
        if self.waiting:
            self._waiting[slots] = False
            self.waiting = bool(self._waiting.any())
        for slot in slots.tolist():
            self._kept[slot] = None

    def resume(self, slot: int, resume: Resume) -> Resume:
        """A slot's resume with what no row has taken yet; to be asked before `end`."""
        kept = self._kept[slot] or Kept()
        kept.retracted(resume.output_len)
        kept.counts = self._counts.all_of(slot)
        return replace(resume, kept=kept, input_logprobs_sent=kept.input_logprobs_sent)

    # --- what is attached -------------------------------------------------------------------------

    def attach(
        self,
        handle: int,
        *,
        input_logprobs: InputLogprobs | None = None,
        hidden_states: Sequence[Any] | None = None,
        routed_experts: Any = None,
        indexer_topk: Any = None,
        customized_info: Mapping[str, Sequence[Any] | None] | None = None,
        time_stats: bytes | None = None,
        cached_tokens_details: CachedTokensDetails | None = None,
    ) -> None:
        """Give what only the host has of a request to the next row of it that is sent.

        Parameters
        ----------
        input_logprobs
            Go once, with the first row in a batch that returns logprobs.
        hidden_states
            One for each token that was accepted since: arrays, CPU tensors or lists of numbers. Up to the
            row's visible length.
        routed_experts, indexer_topk
            Arrays or CPU tensors; the newest goes.
        customized_info
            By key one value, of what msgpack carries, for each token that was accepted since; None: the key
            has none. The values of the row's delta go.
        time_stats
            Bytes that the receiver understands; the newest go.
        cached_tokens_details
            See `cached_tokens.cached_tokens_details`; opening records of later streams tell it again.

        Raises HandleError, and InputError for what the request did not ask for, what cannot travel, and what would
        not fit a frame with the rest that waits; then nothing was changed.
        """
        slot = int(self._slots_of(np.array([handle], np.int64))[0])
        request = self._slots.requests[slot]
        assert request is not None
        for name, value, asked in (
            ("input_logprobs", input_logprobs, request.return_logprob),
            ("hidden_states", hidden_states, request.return_hidden_states),
            ("routed_experts", routed_experts, request.return_routed_experts),
            ("indexer_topk", indexer_topk, request.return_indexer_topk),
        ):
            if value is not None and not asked:
                wanted = "return_logprob" if name == "input_logprobs" else f"return_{name}"
                raise InputError(f"{name}: expected a request with {wanted}, got {request.rid!r}, which did not ask")
        kept = self._kept[slot] or Kept()
        kept.attach(
            self.room - opening_bytes(request) - ROW_BYTES,
            input_logprobs=None if self._no_input_logprobs else input_logprobs,
            hidden_states=hidden_states,
            customized_info=customized_info,
            time_stats=time_stats,
            cached_tokens_details=cached_tokens_details,
            routed_experts=routed_experts,
            indexer_topk=indexer_topk,
        )
        self._kept[slot] = kept
        self._waiting[slot] = self.waiting = True

    def set_counts(self, handles: Any, **counts: Any) -> None:
        """Set counts of requests (names of `side.COUNTS`), int32 or int64 `[n]` each or None: unchanged.

        Those that changed go with the next row. HandleError or InputError, and no change, for a bad argument.
        """
        handles = host_array("handles", handles, (np.int64,), (1,))
        slots = self._slots_of(handles)
        changed = slots[self._counts.set(slots, counts)]
        if len(changed):
            self._waiting[changed] = self.waiting = True

    def _slots_of(self, handles: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of live handles, int64 `[n]`; HandleError if one is not live."""
        slots = handles & SLOT_MASK
        if not np.count_nonzero(~self._live(handles)):
            return slots
        return self._slots.slots_of(handles)  # which says what is wrong

    def _live(self, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        generations = self._slots.generations
        slots = np.minimum(handles & SLOT_MASK, len(generations) - 1)
        return ((generations[slots] << L.SLOT_BITS | slots) == handles) & self._here[slots]

    # --- what rows take ---------------------------------------------------------------------------

    def opening(self, slot: int) -> dict[str, Any]:
        """Counts and details as the fields of an opening record, which tells them."""
        fields = self._counts.opening(slot)
        kept = self._kept[slot]
        if kept is not None and kept.details is not None:
            fields["cached_tokens_details"] = kept.details
            kept.details_told = True
        return fields

    def take(
        self, packed: PackedStep, slots: NDArray[np.int32], room: int, *, scores: bool
    ) -> dict[int, dict[str, Any]]:
        """By row what the rows of a step carry, as fields of RowExtras; it counts as told from now on.

        To be called after the openings of the step were made. `room`: bytes that they leave; what does not fit
        waits for a later row, so final rows come first. `scores`: the batch returns logprobs.
        """
        if not self.waiting:
            return {}
        rows = np.flatnonzero(self._waiting[slots])
        last = (packed.column(L.R_FLAGS)[rows] & L.ROW_FINAL) != 0
        rows = np.concatenate([rows[last], rows[~last]])
        columns = [packed.column(f)[rows].tolist() for f in (L.R_TOKEN_START, L.R_VISIBLE_LEN, L.R_FLAGS)]
        left, taken = Room(room), {}
        for row, slot, start, end, flags in zip(rows.tolist(), slots[rows].tolist(), *columns, strict=True):
            fields = self._take_row(slot, start, end, left, final=bool(flags & L.ROW_FINAL), scores=scores)
            if fields:
                taken[row] = fields
        if len(rows):
            self.waiting = bool(self._waiting.any())
        return taken

    def _take_row(self, slot: int, start: int, end: int, room: Room, *, final: bool, scores: bool) -> dict[str, Any]:
        kept = self._kept[slot]
        fields: dict[str, Any] = {}
        lost = False
        has_room = room.fits(ROW_BYTES)
        if not has_room:
            room.left = -1  # nothing else fits either
        if kept is not None:
            fields, lost = kept.take(start, end, room, final=final, scores=scores, whole=self._whole)
        untold = bool(self._counts.changed[slot])
        if untold and has_room:
            fields["counts"] = self._counts.take(slot)
            untold = False
        self.dropped += lost or (final and untold)
        self._waiting[slot] = untold or (kept is not None and kept.waits())
        return fields

    def returned(self, handles: NDArray[np.int64] | None, control: NDArray[np.int32] | None) -> list[Returned]:
        """Columns that requests of this batch asked for, those aside that `control` skips.

        `handles` is None if nobody knows who is in the batch: then those that any live request asked for.
        """
        if handles is None:
            bits = int(np.bitwise_or.reduce(self._asked))
        else:
            live = self._live(handles)
            if control is not None:
                live &= (control[L.CONTROL_FLAGS_ROW] & L.CONTROL_SKIP) == 0
            bits = int(np.bitwise_or.reduce(self._asked[handles[live] & SLOT_MASK], initial=0))
        return [name for i, name in enumerate(RETURNED) if bits >> i & 1]
