"""Sending: the rows of one step on their way into a frame."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang.batch import Batch


class Sending(NamedTuple):
    """What the parts of a frame are made from.

    Attributes
    ----------
    rows
        int32 `[ROW_WIDTH, rows]` of `cursors.advance`; `slots` int32 `[rows]` is one of its columns.
    reqs, ids
        The requests of the rows, and their own output ids.
    final
        Rows that are their request's last.
    opening
        Rows whose request is not open on the stream.
    """

    batch: Batch
    rows: NDArray[np.int32]
    slots: NDArray[np.int32]
    reqs: list[Any]
    ids: list[Any]
    final: list[int]
    opening: list[int]
