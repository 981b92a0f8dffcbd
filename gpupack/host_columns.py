"""HostColumns: what rows carry beside the packed step, kept by slot until a row takes it (SPEC.md section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.checks import check_rows, host_array
from gpupack.errors import InputError
from gpupack.kept import Kept
from gpupack.packed import PackedStep
from gpupack.request import FRESH, Request, Resume
from gpupack.slots import SlotTable
from gpupack.wire.side import COUNTS, INT32_MAX, RETURNED, CachedTokensDetails, InputLogprobs, Returned

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

    Attributes
    ----------
    waiting
        Whether rows may have something to take.
    asking
        Live requests that asked for a column of RETURNED, so that `returned` needs the batch.
    """

    def __init__(self, slots: SlotTable, *, whole_hidden_states: bool, disaggregated_decode: bool) -> None:
        capacity = len(slots.requests)
        self._slots = slots
        self._whole = whole_hidden_states
        self._no_input_logprobs = disaggregated_decode
        self._kept: list[Kept | None] = [None] * capacity
        self._counts = np.zeros((len(COUNTS), capacity), np.int32)  # newest, by slot
        self._changed = np.zeros(capacity, np.uint8)  # slot: a bit for each count that no row has told
        self._asked = np.zeros(capacity, np.uint8)  # slot: a bit for each of RETURNED
        self._waiting = np.zeros(capacity, np.bool_)  # slot: its next row has something to take
        self.waiting = False
        self.asking = 0

    # --- life of a handle -------------------------------------------------------------------------

    def admit(self, slots: NDArray[np.int64], requests: Sequence[Request], resumes: Sequence[Resume]) -> None:
        """Begin handles; what a resumed request had kept goes on."""
        self._counts[:, slots] = 0
        self._counts[0, slots] = [request.cached_tokens for request in requests]
        self._asked[slots] = [
            request.return_hidden_states | request.return_routed_experts << 1 | request.return_indexer_topk << 2
            for request in requests
        ]
        self.asking += int(np.count_nonzero(self._asked[slots]))
        self._waiting[slots] = False
        for slot, resume in zip(slots.tolist(), resumes, strict=True):
            if resume is not FRESH:
                self._go_on(slot, resume)
        self._changed[slots] = 0
        self.waiting |= bool(self._waiting[slots].any())

    def _go_on(self, slot: int, resume: Resume) -> None:
        kept = resume.kept
        if kept is not None:
            self._counts[:, slot] = kept.counts
            kept = replace(kept, counts=())
        elif resume.input_logprobs_sent:
            kept = Kept(input_logprobs_sent=True)
        self._kept[slot] = kept
        self._waiting[slot] = kept is not None and (kept.waits() or bool(kept.arrays or kept.time_stats))

    def end(self, slots: NDArray[np.int64]) -> None:
        """End handles, and forget what was attached to them."""
        self.asking -= int(np.count_nonzero(self._asked[slots]))
        self._asked[slots] = 0
        self._waiting[slots] = False
        for slot in slots.tolist():
            self._kept[slot] = None

    def resume(self, slot: int, resume: Resume) -> Resume:
        """A slot's resume with what no row has taken yet; to be asked before `end`."""
        kept = self._kept[slot] or Kept()
        kept.retracted(resume.output_len)
        kept.counts = tuple(self._counts[:, slot].tolist())
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

        Raises HandleError, and InputError for what the request did not ask for or what cannot travel; then
        nothing was changed.
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
        for index, name in enumerate(COUNTS):
            if name not in arrays:
                continue
            differs = self._counts[index, slots] != arrays[name]
            if np.count_nonzero(differs):
                changed = slots[differs]
                self._counts[index, changed] = arrays[name][differs]
                self._changed[changed] |= np.uint8(1 << index)
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
        return (generations[slots] << L.SLOT_BITS | slots) == handles

    # --- what rows take ---------------------------------------------------------------------------

    def opening(self, slot: int) -> dict[str, Any]:
        """Counts and details as the fields of an opening record, which tells them."""
        self._changed[slot] = 0
        counts = self._counts[:, slot].tolist()
        fields: dict[str, Any] = dict(zip(COUNTS, counts, strict=True)) if any(counts) else {}
        kept = self._kept[slot]
        if kept is not None and kept.details is not None:
            fields["cached_tokens_details"] = kept.details
            kept.details_told = True
        return fields

    def take(self, packed: PackedStep, slots: NDArray[np.int32], *, scores: bool) -> dict[int, dict[str, Any]]:
        """By row what the rows of a step carry, as fields of RowExtras; it counts as told from now on.

        To be called after the openings of the step were made. `scores`: the batch returns logprobs.
        """
        if not self.waiting:
            return {}
        rows = np.flatnonzero(self._waiting[slots])
        columns = [packed.column(f)[rows].tolist() for f in (L.R_TOKEN_START, L.R_VISIBLE_LEN, L.R_FLAGS)]
        taken = {}
        for row, slot, start, end, flags in zip(rows.tolist(), slots[rows].tolist(), *columns, strict=True):
            kept, changed = self._kept[slot], int(self._changed[slot])
            fields: dict[str, Any] = {}
            if kept is not None:
                fields = kept.take(start, end, final=bool(flags & L.ROW_FINAL), scores=scores, whole=self._whole)
            if changed:
                fields["counts"] = {n: int(self._counts[i, slot]) for i, n in enumerate(COUNTS) if changed >> i & 1}
            self._changed[slot] = 0
            self._waiting[slot] = kept is not None and kept.waits()
            if fields:
                taken[row] = fields
        if taken:
            self.waiting = bool(self._waiting.any())
        return taken

    def returned(self, handles: NDArray[np.int64], control: NDArray[np.int32] | None) -> list[Returned]:
        """Columns that requests of this batch asked for, those aside that `control` skips."""
        live = self._live(handles)
        if control is not None:
            live &= (control[L.CONTROL_FLAGS_ROW] & L.CONTROL_SKIP) == 0
        bits = int(np.bitwise_or.reduce(self._asked[handles[live] & SLOT_MASK], initial=0))
        return [name for i, name in enumerate(RETURNED) if bits >> i & 1]
