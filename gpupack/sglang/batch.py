"""Batch: what the streamer is called with, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang import cursors as C
from gpupack.sglang.roster import Roster

if TYPE_CHECKING:
    from gpupack.sglang.device_backlog import PackedItems

_NONE8 = np.empty(0, np.uint8)


class Batch:
    """The requests of one call.

    Attributes
    ----------
    slots, lens
        int32 `[n]`.
    ids
        The requests' own output ids.
    ends
        int32 `[n]`: where the output of a finished request ends, else `cursors.RUNNING`, or `cursors.LATE` for one
        whose final row has gone out.
    retracted
        uint8 `[n]`, or empty where nobody looks at it.
    skipped
        Row of the request to leave alone, or -1.
    wanted
        Bits of `roster.WANTED` that a request of the batch asked for, the skipped one aside.
    packed
        Token ids and logprobs of the rows that send, where the device backend has them; None: the requests' lists have.
    """

    __slots__ = (
        "ends", "final", "ids", "lens", "packed", "reqs", "retracted", "return_logprob", "skipped", "slots", "wanted",
    )  # fmt: skip

    def __init__(self, reqs: Sequence[Any], return_logprob: bool, skip_req: Any, roster: Roster) -> None:
        self.reqs = reqs
        self.packed: PackedItems | None = None
        self.return_logprob = return_logprob
        self.slots = roster.slots_of(reqs)
        count = len(reqs)
        self.ids = [req.output_ids for req in reqs]
        lens = list(map(len, self.ids))
        self.lens = np.array(lens, np.int32)
        self.skipped = -1
        if skip_req is not None:
            self.skipped = next((i for i, req in enumerate(reqs) if req is skip_req), -1)
        self.ends = np.full(count, C.RUNNING, np.int32)
        reasons = [req.finished_reason for req in reqs]
        self.final: list[int] = []
        if reasons.count(None) != count:
            for i, reason in enumerate(reasons):
                if reason is not None and i != self.skipped:
                    self._finished(i, reqs[i], lens[i])
        self.retracted = _NONE8
        if return_logprob:
            self.retracted = np.array([req.is_retracted for req in reqs], np.uint8)
        wanted = roster.wanted[self.slots]
        if self.skipped >= 0:
            wanted[self.skipped] = 0
        self.wanted = int(np.bitwise_or.reduce(wanted, initial=0))

    def _finished(self, row: int, req: Any, length: int) -> None:
        if req.finished_output:
            self.ends[row] = C.LATE
            return
        end = length if req.finished_len is None else req.finished_len
        self.ends[row] = min(end, length)
        self.final.append(row)

    def mark_final(self) -> None:
        """Tell the requests that end with this call so."""
        for row in self.final:
            req = self.reqs[row]
            req.finished_output = True
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)

    def rows_of(self, rows: NDArray[np.int32]) -> tuple[list[Any], list[Any]]:
        """The requests of rows and their output ids, in the order of the rows."""
        if rows.shape[1] == len(self.reqs):
            return list(self.reqs), self.ids
        indices = rows[C.BATCH_INDEX].tolist()
        return [self.reqs[i] for i in indices], [self.ids[i] for i in indices]
