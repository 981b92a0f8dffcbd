"""Joining frames that wait for a slow receiver into one (docs/wire.md, "A slow receiver")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.transport.merge_sides import join_sides
from gpupack.wire.frame import Frame, Int32

Index = NDArray[np.intp]


def merge_frames(frames: Sequence[Frame]) -> Frame:
    """Join frames of one sender, oldest first, into one that says the same. Does not block.

    Rows of one handle become one row, at the place of the first; a row without logprobs joins one with
    as if it had none of them. Whether the frames may be joined is for the caller to know
    (`pending.PendingFrames`): no slot under two generations, no opening or restart of a row that is
    already there. Array work only, but for rows with an opening record or extras.
    """
    slot = np.concatenate([frame.slot for frame in frames])
    target, rows = _places(slot)
    order = np.argsort(target, kind="stable")  # source rows by the row they join, oldest first
    counts = np.bincount(target, minlength=rows)
    ends = np.cumsum(counts)
    newest, first = order[ends - 1], order[ends - counts]

    def column(name: str, rows_of: Index) -> Int32:
        return np.concatenate([getattr(frame, name) for frame in frames])[rows_of]

    match = None
    if any(frame.match is not None for frame in frames):
        match = np.concatenate([_zeros_unless(frame.match, frame.rows) for frame in frames])[newest]
    flags = column("flags", order)
    token_indptr, token_ids = _join_items([(f.token_indptr, f.token_ids) for f in frames], order, ends)
    logprob_indptr = logprobs = None
    if any(frame.has_logprobs for frame in frames):
        parts = [(_zeros_unless(f.logprob_indptr, f.rows + 1), _no_logprobs(f.logprobs)) for f in frames]
        logprob_indptr, logprobs = _join_items(parts, order, ends)
    families_indptr = families = None
    if any(frame.families is not None for frame in frames):
        records = [(_zeros_unless(f.families_indptr, f.rows + 1), _zeros_unless(f.families, 0)) for f in frames]
        families_indptr, families = _join_items(records, order, ends)
    return frames[-1]._replace(
        idle=all(frame.idle for frame in frames),
        slot=slot[first],
        generation=column("generation", first),
        flags=np.bitwise_or.reduceat(flags, ends - counts) if rows else flags,
        visible_len=column("visible_len", newest),
        match=match,
        token_indptr=token_indptr,
        token_ids=token_ids,
        logprob_indptr=logprob_indptr,
        logprobs=logprobs,
        families_indptr=families_indptr,
        families=families,
        spec=_newest_counts(frames, newest),
        side=join_sides(frames, target),
    )


def _places(slot: Int32) -> tuple[Index, int]:
    """For each source row the row that it joins, by first appearance of its slot; and their number."""
    _, first, inverse = np.unique(slot, return_index=True, return_inverse=True)
    place = np.empty(len(first), np.intp)
    place[np.argsort(first)] = np.arange(len(first))
    return place[inverse], len(first)


def _newest_counts(frames: Sequence[Frame], newest: Index) -> Int32 | None:
    """The speculative counters of rows `newest`, column by column."""
    counted = [frame.spec.reshape(-1, frame.rows) for frame in frames if frame.spec is not None and frame.rows]
    return np.concatenate(counted, axis=1)[:, newest].ravel() if counted else None


def _zeros_unless(column: Int32 | None, entries: int) -> Int32:
    return np.zeros(entries, np.int32) if column is None else column


def _no_logprobs(logprobs: NDArray[np.float32] | None) -> NDArray[np.float32]:
    return np.empty(0, np.float32) if logprobs is None else logprobs


def _join_items(parts: list[tuple[Int32, NDArray[Any]]], order: Index, ends: Index) -> tuple[Int32, NDArray[Any]]:
    """Items of all source rows in `order`, and the offsets of rows that end at `ends` of that order."""
    items = np.concatenate([part for _, part in parts])
    lengths = np.concatenate([np.diff(indptr) for indptr, _ in parts])
    starts = np.cumsum(lengths, dtype=np.intp) - lengths
    lengths, starts = lengths[order], starts[order]
    filled = np.cumsum(lengths, dtype=np.intp)
    # Item j of the result lies in `items` at the start of its source row plus its distance from it.
    source = np.repeat(starts - (filled - lengths), lengths) + np.arange(len(items))
    indptr = np.zeros(len(ends) + 1, np.int32)
    indptr[1:] = filled[ends - 1]
    return indptr, items[source]
