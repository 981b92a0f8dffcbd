"""Items of rows as a frame has them, from the lists of the engine's requests."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.sglang import emit_rule as C
from gpupack.sglang.columns import Int32, Items, Scores
from gpupack.sglang.decode_columns import DecodeLogprobs, decode_logprobs
from gpupack.sglang.output_rows import OutputRows


def token_items(out: OutputRows) -> Items:
    """What each row has of its output ids. OverflowError for an id that does not fit into 32 bits."""
    batch, rows, ids = out.batch, out.rows, out.ids
    if out.packed is not None:
        return out.packed.tokens
    if batch.facts[C.ONE_TOKEN]:
        return Items(np.arange(len(ids) + 1, dtype=np.int32), np.array([one[-1] for one in ids], np.int32))
    begins, ends = rows[C.TOKEN_BEGIN], rows[C.TOKEN_END]
    cut = [one[begin:end] for one, begin, end in zip(ids, begins.tolist(), ends.tolist(), strict=True)]
    wide = np.frombuffer(b"".join(cut), np.int64)
    narrow = wide.astype(np.int32)
    if not np.array_equal(narrow, wide):
        raise OverflowError("token ids: expected 32 bits")
    return Items(_indptr(np.maximum(ends - begins, 0)), narrow)


def logprob_items(out: OutputRows, widths: Int32) -> Scores:
    """The logprobs of each row, so far as there are any, and their records.

    `widths` int32 `[rows, 2]`: top and token-ids logprobs a position that each request asked for.
    """
    if out.packed is not None:
        return out.packed.scores
    scores = decode_logprobs(out)
    if scores is not None:
        return _one_each(scores)
    reqs, rows = out.reqs, out.rows
    cuts = list(map(slice, rows[C.LOGPROB_BEGIN].tolist(), rows[C.LOGPROB_END].tolist()))
    logs = [req.logprob if req.return_logprob else None for req in reqs]
    values = [() if log is None else log.output_token_logprobs_val[cut] for log, cut in zip(logs, cuts, strict=True)]
    lengths = np.array(list(map(len, values)), np.int64)
    logprobs = np.array(list(chain.from_iterable(values)), np.float32)
    words = (2 * widths[:, 0] + widths[:, 1]) * lengths
    if not words.any():
        return Scores(_indptr(lengths), logprobs, None, None)
    indptr = _indptr(words)
    families = np.zeros(int(indptr[-1]), np.int32)
    for top, ids in np.unique(widths[words > 0], axis=0).tolist():
        members = np.flatnonzero((words > 0) & (widths == (top, ids)).all(axis=1)).tolist()
        records = _records([(logs[row], cuts[row]) for row in members], top, ids)
        if len(members) == len(logs):
            families[:] = records.ravel()
        else:
            places = np.concatenate([np.arange(indptr[row], indptr[row + 1]) for row in members])
            families[places] = records.ravel()
    return Scores(_indptr(lengths), logprobs, indptr, families)


def _one_each(scores: DecodeLogprobs) -> Scores:
    """One position a row."""
    rows, top = scores.top_values.shape
    indptr = np.arange(rows + 1, dtype=np.int32)
    logprobs = scores.values.astype(np.float32)
    if not top:
        return Scores(indptr, logprobs, None, None)
    records = np.empty((rows, 2 * top), np.int32)
    records[:, :top] = scores.top_values.astype(np.float32).view(np.int32)
    records[:, top:] = scores.top_ids
    return Scores(indptr, logprobs, 2 * top * indptr, records.ravel())


def _records(parts: list[Any], top: int, ids: int) -> Int32:
    """Records of the positions of rows of one width: top values, top ids, token-ids values."""
    columns = []
    if top:
        columns.append(_table([log.output_top_logprobs_val[cut] for log, cut in parts], top, np.float32).view(np.int32))
        columns.append(_table([log.output_top_logprobs_idx[cut] for log, cut in parts], top, np.int32))
    if ids:
        values = _table([log.output_token_ids_logprobs_val[cut] for log, cut in parts], ids, np.float32)
        columns.append(values.view(np.int32))
    return np.concatenate(columns, axis=1)


def _table(rows: list[list[list[Any]]], width: int, dtype: Any) -> NDArray[Any]:
    """Lists of `width` values as `[positions, width]`; ValueError if one is not as long."""
    positions = list(chain.from_iterable(rows))
    if not {*map(len, positions)} <= {width}:
        raise ValueError(f"logprobs: expected {width} at each position")
    return np.array(list(chain.from_iterable(positions)), dtype).reshape(-1, width)


def with_hidden(out: OutputRows, flags: Int32, tokens: Items, scores: Scores) -> Items:
    """Tokens with the one, not output, of each row that has a logprob at length 0; their rows are flagged."""
    if out.batch.facts[C.ONE_TOKEN]:
        return tokens
    reqs, rows = out.reqs, out.rows
    hidden = np.flatnonzero((rows[C.TOKEN_END] == 0) & (np.diff(scores.indptr) == 1))
    hidden = hidden[[bool(len(reqs[row].output_ids)) for row in hidden.tolist()]] if len(hidden) else hidden
    if not len(hidden):
        return tokens
    flags[hidden] |= L.ROW_HIDDEN_TOKEN
    lists = [tokens.items[a:b].tolist() for a, b in zip(tokens.indptr[:-1], tokens.indptr[1:], strict=True)]
    for row in hidden.tolist():
        lists[row] = [reqs[row].output_ids[0]]
    return Items(_indptr(np.array(list(map(len, lists)))), np.array(list(chain.from_iterable(lists)), np.int32))


def spec_counters(reqs: list[Any]) -> Int32:
    """The counters of speculative decoding, column by column."""
    counts = [
        [req.spec_verify_ct for req in reqs],
        [req.spec_num_correct_drafts for req in reqs],
        [req.spec_num_block_accept_tokens for req in reqs],
        [req.spec_num_cap_tokens for req in reqs],
    ]
    drafts = [req.spec_correct_drafts_histogram for req in reqs]
    caps = [req.spec_cap_lens_histogram for req in reqs]
    buckets = max(2, *map(len, drafts), *map(len, caps))
    histograms = np.zeros((2 * buckets, len(reqs)), np.int32)
    for first, column in ((0, drafts), (buckets, caps)):
        for row, histogram in enumerate(column):
            histograms[first : first + len(histogram), row] = histogram
    return np.concatenate([np.array(counts, np.int32), histograms]).ravel()


def _indptr(lengths: NDArray[Any]) -> Int32:
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return indptr
