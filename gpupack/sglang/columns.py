"""Items of the rows of a step as arrays: token ids, logprobs and their records."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


class Items(NamedTuple):
    """Offsets int32 `[rows + 1]`, and the items of all rows, joined."""

    indptr: Int32
    items: Int32


class Scores(NamedTuple):
    """Logprobs of rows, and the records of those that have top or token-ids logprobs; None without any."""

    indptr: Int32
    logprobs: NDArray[np.float32]
    families_indptr: Int32 | None
    families: Int32 | None


class PackedItems(NamedTuple):
    """Items of the rows of a step.

    `score_ids` int32 are the tokens of the logprobs; `widths` int32 `[rows]` top logprobs a position.
    """

    tokens: Items
    scores: Scores
    score_ids: Int32
    widths: Int32
