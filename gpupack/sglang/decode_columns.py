"""What a decode step has where all its rows are alike: a token each, and DecodeLogprobs, if all asked for the same."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang import emit_rule as C
from gpupack.sglang.columns import PackedItems
from gpupack.sglang.output_rows import OutputRows


class DecodeLogprobs(NamedTuple):
    """One position of each row.

    Attributes
    ----------
    values, top_values
        float64 `[rows]` and `[rows, top]`.
    ids, top_ids
        int32 of the same shapes.
    """

    values: NDArray[np.float64]
    ids: NDArray[np.int32]
    top_values: NDArray[np.float64]
    top_ids: NDArray[np.int32]


def decode_tokens(out: OutputRows) -> NDArray[np.int64]:
    """The token of each row, int64 `[rows]`, of rows that have one each."""
    packed = out.packed
    if packed is not None:
        return packed.tokens.items.astype(np.int64)
    return np.array([one[-1] for one in out.ids], np.int64)


def decode_logprobs(out: OutputRows) -> DecodeLogprobs | None:
    """The logprobs of rows that have one each and are alike; None where they are otherwise, or have another form."""
    width = out.batch.membership.width
    if not out.batch.facts[C.ONE_LOGPROB] or width is None or width[1]:
        return None
    if out.packed is not None:
        return _of_packed(out.packed, len(out.reqs), width[0])
    top, logs, at = width[0], [req.logprob for req in out.reqs], out.rows[C.LOGPROB_BEGIN].tolist()
    none: list[Any] = []
    try:
        values = [log.output_token_logprobs_val[i] for log, i in zip(logs, at, strict=True)]
        ids = [log.output_token_logprobs_idx[i] for log, i in zip(logs, at, strict=True)]
        tops = [log.output_top_logprobs_val[i] for log, i in zip(logs, at, strict=True)] if top else none
        top_ids = [log.output_top_logprobs_idx[i] for log, i in zip(logs, at, strict=True)] if top else none
        if not {*map(len, tops), *map(len, top_ids)} <= {top} or {*map(type, values)} != {float}:
            return None
        return DecodeLogprobs(
            np.array(values, np.float64),
            np.array(ids, np.int32),
            _table(tops, np.float64, len(logs), top),
            _table(top_ids, np.int32, len(logs), top),
        )
    except (IndexError, TypeError, ValueError, OverflowError):
        return None


def _of_packed(packed: PackedItems, rows: int, top: int) -> DecodeLogprobs | None:
    if len(packed.scores.logprobs) != rows:
        return None
    records = np.empty((rows, 0), np.int32) if packed.scores.families is None else packed.scores.families
    records = records.reshape(rows, 2 * top)
    return DecodeLogprobs(
        packed.scores.logprobs.astype(np.float64),
        packed.score_ids,
        np.ascontiguousarray(records[:, :top]).view(np.float32).astype(np.float64),
        records[:, top:],
    )


def _table(rows: list[list[Any]], dtype: Any, count: int, width: int) -> NDArray[Any]:
    return np.fromiter(chain.from_iterable(rows), dtype, count * width).reshape(count, width)
