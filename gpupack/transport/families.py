"""Columns of a frame as lists by row: items of any channel, and records of the family section."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.wire.frame import Frame, Int32


def split_items(items: NDArray[Any], indptr: Int32) -> list[list[Any]]:
    """The items of each row as a list; at once if every row has as many."""
    rows = len(indptr) - 1
    each = len(items) // rows if rows else 0
    if each * rows == len(items) and np.array_equal(indptr, np.arange(0, len(items) + 1, each or 1)):
        return items.reshape(rows, each).tolist()
    values, offsets = items.tolist(), indptr.tolist()
    return [values[start:end] for start, end in pairwise(offsets)]


def split_families(frame: Frame, requests: NDArray[np.object_]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows that have top or token-ids logprobs, and these fields of their deltas.

    `requests` has the RequestRecord of each row. Rows of one width are split together.
    """
    families, indptr = frame.families, frame.families_indptr
    if families is None or indptr is None:
        return
    lengths = np.diff(indptr)
    by_width: dict[tuple[int, int], list[int]] = {}
    for row in np.flatnonzero(lengths).tolist():
        opening = requests[row].opening
        by_width.setdefault((opening.top_logprobs_num, len(opening.token_ids_logprob)), []).append(row)
    for (top, ids), rows in by_width.items():
        width = 2 * top + ids
        ends = np.cumsum(lengths[rows], dtype=np.intp)
        # Word j of these rows lies at the start of its row plus its distance from the row's first word.
        starts = np.repeat(indptr[rows] - (ends - lengths[rows]), lengths[rows])
        records = families[starts + np.arange(len(starts))].reshape(-1, width)
        fields: dict[str, list[Any]] = {}
        if top:
            fields["top_logprobs_val"] = records[:, :top].copy().view(np.float32).tolist()
            fields["top_logprobs_idx"] = records[:, top : 2 * top].tolist()
        if ids:
            fields["token_ids_logprobs_val"] = records[:, 2 * top :].copy().view(np.float32).tolist()
        for row, (start, end) in zip(rows, pairwise([0, *(ends // width).tolist()]), strict=True):
            yield row, {name: values[start:end] for name, values in fields.items()}
