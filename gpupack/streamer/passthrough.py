"""Conveyed: the accepted runs of host-judged requests that a packed step passes on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpupack.core.packed_output import PackedStep
from gpupack.streamer.find_passthrough import FIELDS, find_conveyed

Int32 = NDArray[np.int32]


class Conveyed:
    """The accepted runs that a packed step conveys, for a judge to look at; valid until the next are found.

    Attributes
    ----------
    rows, batch_rows, slots
        int32 `[n]`: places in the packed step and in the batch, slots.
    handles
        int64 `[n]`.
    starts, accept_lens
        int32 `[n]`, into `token_ids`.
    logprob_starts, record_starts
        int32 `[n]`: the same for logprobs, and for words of families.
    judged
        How many of the slots the finder was asked for.
    """

    __slots__ = (
        "accept_lens", "batch_rows", "handles", "judged", "logprob_starts", "packed", "record_starts", "rows", "slots",
        "starts",
    )  # fmt: skip

    def __init__(self, packed: PackedStep, handles: NDArray[np.int64], fields: Int32, judged: int) -> None:
        self.packed, self.handles, self.judged = packed, handles, judged
        self.rows, self.batch_rows, self.slots, self.accept_lens = fields[:4]
        self.starts, self.logprob_starts, self.record_starts = fields[4:]  # in the order of loop_conveyed

    @property
    def token_ids(self) -> Int32:
        """Token ids of the whole packed step, int32."""
        return self.packed.token_ids


class ConveyedFinder:
    """Finds the conveyed rows of packed steps of up to `batch_capacity` rows, in memory that it reuses."""

    def __init__(self, batch_capacity: int) -> None:
        self._handles = np.empty(batch_capacity, np.int64)
        self._fields = np.empty((FIELDS, batch_capacity), np.int32)

    def find(self, packed: PackedStep, judged: NDArray[np.bool_]) -> Conveyed:
        """The conveyed rows; `judged`, bool `[capacity]`, are slots that somebody wants to look at."""
        count, found = find_conveyed(packed.buffer, packed.geometry.row_stride, judged, self._handles, self._fields)
        return Conveyed(packed, self._handles[:count], self._fields[:, :count], found)
