"""Packed items as the lists that the engine's message has."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang.columns import Items, PackedItems


def token_lists(tokens: Items) -> list[Any]:
    """Token ids of each row, 64 bits wide."""
    joined = array("q", tokens.items.astype(np.int64).tobytes())
    return _cut(joined, tokens.indptr)


def logprob_lists(packed: PackedItems, reqs: list[Any]) -> dict[str, list[Any]]:
    """The six columns of output logprobs; rows without any share one empty list."""
    nothing: list[Any] = []
    asked = [bool(req.return_logprob) for req in reqs]
    values = _cut(packed.scores.logprobs.tolist(), packed.scores.indptr)
    ids = _cut(packed.score_ids.tolist(), packed.scores.indptr)
    tops: list[tuple[list[Any], list[Any]]] = [(nothing, nothing)] * len(reqs)
    if packed.scores.families is not None and packed.scores.families_indptr is not None:
        records, starts = packed.scores.families, packed.scores.families_indptr.tolist()
        for row in np.flatnonzero(np.diff(packed.scores.families_indptr)).tolist():
            tops[row] = _top_lists(records[starts[row] : starts[row + 1]], int(packed.widths[row]))
    return {
        "output_token_logprobs_val": [one if has else nothing for one, has in zip(values, asked, strict=True)],
        "output_token_logprobs_idx": [one if has else nothing for one, has in zip(ids, asked, strict=True)],
        "output_top_logprobs_val": [vals for vals, _ in tops],
        "output_top_logprobs_idx": [idx for _, idx in tops],
        "output_token_ids_logprobs_val": [nothing] * len(reqs),
        "output_token_ids_logprobs_idx": [nothing] * len(reqs),
    }


def _top_lists(records: NDArray[np.int32], top: int) -> tuple[list[Any], list[Any]]:
    """Values and ids of the records of one row: `top` values, then their ids, a position."""
    table = records.reshape(-1, 2 * top)
    return table.view(np.float32)[:, :top].tolist(), table[:, top:].tolist()


def _cut(joined: Any, indptr: NDArray[np.int32]) -> list[Any]:
    ends = indptr.tolist()
    return [joined[begin:end] for begin, end in pairwise(ends)]
