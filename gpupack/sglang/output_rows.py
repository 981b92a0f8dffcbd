"""OutputRows: the rows of one step on their way out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang import emit_rule as C
from gpupack.sglang.batch import Batch
from gpupack.sglang.columns import PackedItems


class OutputRows(NamedTuple):
    """What the columns of a message or a frame are made from.

    Attributes
    ----------
    rows
        int32 `[ROW_WIDTH, rows]` of `emit_rule.advance`; `slots` int32 `[rows]` is one of its columns.
    reqs, ids
        The requests of the rows, and their own output ids.
    final
        Rows that are their request's last.
    odd
        Rows of `Batch.odd`.
    whole
        Every request of the batch has a row.
    packed
        Items of the rows, where the device backend has them; None: the requests' lists have.
    """

    batch: Batch
    rows: NDArray[np.int32]
    slots: NDArray[np.int32]
    reqs: list[Any]
    ids: list[Any]
    final: list[int]
    odd: list[int]
    whole: bool
    packed: PackedItems | None

    @classmethod
    def of(cls, batch: Batch, rows: NDArray[np.int32], final: list[int], packed: PackedItems | None) -> OutputRows:
        """Rows of `emit_rule.advance`; `final` are those that are last."""
        reqs, ids = batch.rows_of(rows)
        whole = len(reqs) == len(batch.reqs)
        return cls(batch, rows, rows[C.SLOT], reqs, ids, final, batch.odd_rows(rows), whole, packed)

    @property
    def stale(self) -> list[int]:
        """Rows whose prefill columns may have changed."""
        return [
            row for row in self.odd if self.reqs[row].retraction_count or self.reqs[row].finished_reason is not None
        ]

    @property
    def reasoning(self) -> list[int]:
        """Reasoning tokens of each row."""
        return [req.reasoning_tokens for req in self.reqs] if self.odd else [0] * len(self.reqs)

    @property
    def customized(self) -> bool:
        """Whether a row has customized info."""
        return any(self.reqs[row].customized_info is not None for row in self.odd)
