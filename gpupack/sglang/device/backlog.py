"""Backlog: the output of running requests that packed steps brought, kept on the host until it is sent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.packed_output import PackedStep
from gpupack.sglang import emit_rule as C
from gpupack.sglang.batch import Batch
from gpupack.sglang.batch_membership import BatchMembership
from gpupack.sglang.columns import Items, PackedItems, Scores
from gpupack.sglang.device import loops as loops
from gpupack.sglang.request_states import RequestStates

WINDOW = 256  # unsent tokens of a request that are kept
RECORD_WINDOW = 64  # the same for one that asked for top logprobs
_NOTHING = np.empty(0, np.int32)
_NO_RUNS = (_NOTHING, *[np.zeros(1, np.int32)] * 3, *[_NOTHING] * 3)


class Backlog:
    """Rings by slot of RequestStates; what is known of a slot is always what the engine has committed, or nothing.

    It has no cursors: those of RequestStates say what a row is to carry, and `items` has it or has not. So a batch may
    go any way at any step, and what went another way is not kept, until the requests have sent it.
    """

    def __init__(self, request_states: RequestStates) -> None:
        self._request_states = request_states
        self._met: BatchMembership | None = None
        self._kept = np.zeros((0, 2), np.int32)
        self._generation = np.zeros(0, np.int32)
        self._tokens = self._scores = np.zeros((0, WINDOW), np.int32)
        self._records = np.zeros((0, RECORD_WINDOW, 0), np.int32)

    def meet(self, membership: BatchMembership) -> None:
        """Note how long the output of requests is that were not seen before."""
        if membership is self._met:
            return
        self._met, slots = membership, membership.slots
        self._reserve(0)
        new = np.flatnonzero(self._generation[slots] != membership.generation)
        if len(new):
            lens = np.array([len(membership.reqs[row].output_ids) for row in new.tolist()], np.int32)
            self._kept[slots[new]] = lens[:, None]
            self._generation[slots[new]] = membership.generation[new]

    def take(self, slots: NDArray[np.int32], lens: NDArray[np.int32], packed: PackedStep | None) -> int:
        """Keep the runs of a packed step, as far as the outputs of these requests have grown to `lens`.

        None: a step that was not packed, or none. Returns how many requests have grown otherwise.
        """
        runs = _NO_RUNS
        if packed is not None and packed.rows:
            runs = (
                packed.column(L.R_BATCH_INDEX), packed.token_indptr, packed.logprob_indptr, packed.families_indptr,
                packed.token_ids, packed.logprobs.view(np.int32), packed.families,
            )  # fmt: skip
        widths = self._widths(slots)
        return int(loops.take_runs(self._kept, self._rings(), runs, slots, lens, widths))

    def items(self, batch: Batch, rows: NDArray[np.int32]) -> PackedItems | None:
        """Items of rows of `emit_rule.advance`; None if one is missing, or differs from the output of its request."""
        slots, count = rows[C.SLOT], rows.shape[1]
        ranges = np.ascontiguousarray(rows[[C.TOKEN_BEGIN, C.TOKEN_END, C.LOGPROB_BEGIN, C.LOGPROB_END]])
        widths = self._widths(slots)
        starts = tuple(np.empty(count + 1, np.int32) for _ in range(3))
        if loops.measure(self._kept, slots, ranges, widths, (*starts, *[_NOTHING] * 4)) >= 0:
            return None
        tokens, scores, records, score_ids = (np.empty(starts[i][-1], np.int32) for i in (0, 1, 2, 1))
        loops.give_items(self._rings(), slots, ranges, widths, (*starts, tokens, scores, records, score_ids))
        items = Items(starts[0], tokens)
        if batch.final and not _as_committed(batch, rows, items):
            return None
        families = (starts[2], records) if len(records) else (None, None)
        return PackedItems(items, Scores(starts[1], scores.view(np.float32), *families), score_ids, widths // 2)

    def _widths(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Words of a record, int32 `[n]`; the record ring is as wide."""
        words: NDArray[np.int32] = 2 * self._request_states.widths[slots, 0]
        self._reserve(int(words.max(initial=0)))
        return words

    def _rings(self) -> tuple[NDArray[np.int32], ...]:
        return self._tokens, self._scores, self._records

    def _reserve(self, words: int) -> None:
        slots, have = len(self._request_states.generation), len(self._kept)
        if slots > have:
            self._kept = _grown(self._kept, (slots, 2))
            self._generation = _grown(self._generation, (slots,))
            self._tokens, self._scores = (_grown(ring, (slots, WINDOW)) for ring in (self._tokens, self._scores))
        words = max(words, self._records.shape[2])
        if self._records.shape[::2] != (slots, words):
            self._records = _grown(self._records, (slots if words else 0, RECORD_WINDOW, words))


def _grown(array: NDArray[np.int32], shape: tuple[int, ...]) -> NDArray[np.int32]:
    grown = np.zeros(shape, np.int32)
    grown[tuple(map(slice, array.shape))] = array
    return grown


def _as_committed(batch: Batch, rows: NDArray[np.int32], items: Items) -> bool:
    """Whether final rows carry what their requests have as output: an engine replaces an id outside the vocabulary."""
    places = np.searchsorted(rows[C.BATCH_INDEX], batch.final).tolist()
    begins, ends = rows[C.TOKEN_BEGIN].tolist(), rows[C.TOKEN_END].tolist()
    return all(
        items.items[items.indptr[row] : items.indptr[row + 1]].tolist()
        == batch.ids[index][begins[row] : ends[row]].tolist()
        for row, index in zip(places, batch.final, strict=True)
    )
