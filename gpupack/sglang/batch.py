"""Batch: what the streamer is called with, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang import emit_rule as C
from gpupack.sglang.request_states import RequestStates

_NONE8 = np.empty(0, np.uint8)


class Batch:
    """The requests of one call.

    Attributes
    ----------
    membership
        What stays as it is of the requests; `slots` int32 `[n]` is from there.
    lens
        int32 `[n]`.
    ids
        The requests' own output ids.
    ends
        int32 `[n]`: where the output of a finished request ends, else `emit_rule.RUNNING`, or `emit_rule.LATE` for one
        whose final row has gone out.
    odd
        Requests of which there is more to say than of one that decodes: finished, once retracted, with reasoning
        tokens or customized info.
    facts
        int64 `[cursors.FACTS]`: what `emit_rule.advance` said of the rows.
    retracted
        uint8 `[n]`, or empty where nobody looks at it.
    skipped
        Row of the request to leave alone, or -1.
    wanted
        Bits of `request_states.WANTED` that a request of the batch asked for, the skipped one aside.
    """

    __slots__ = (
        "ends", "facts", "final", "ids", "lens", "membership", "odd", "reqs", "retracted", "return_logprob",
        "skipped", "slots", "wanted",
    )  # fmt: skip

    def __init__(self, reqs: Sequence[Any], return_logprob: bool, skip_req: Any, request_states: RequestStates) -> None:
        self.reqs = reqs
        self.return_logprob = return_logprob
        self.membership = request_states.membership_of(reqs)
        self.slots = self.membership.slots
        self.facts = np.zeros(C.FACTS, np.int64)
        self.ids = [req.output_ids for req in reqs]
        self.lens = np.fromiter(map(len, self.ids), np.int32, len(reqs))
        self.skipped = -1
        if skip_req is not None:
            self.skipped = next((i for i, req in enumerate(reqs) if req is skip_req), -1)
        self.odd = [
            i
            for i, req in enumerate(reqs)
            if req.finished_reason is not None
            or req.retraction_count
            or req.reasoning_tokens
            or req.customized_info is not None
        ]
        self.ends = np.full(len(reqs), C.RUNNING, np.int32)
        self.final: list[int] = []
        self.retracted = _NONE8
        if self.odd:
            self._take_odd()
        wanted = self.membership.wanted
        if self.skipped >= 0:
            wanted = np.delete(wanted, self.skipped)
        self.wanted = int(np.bitwise_or.reduce(wanted, initial=0))

    def _take_odd(self) -> None:
        retracted = []
        for i in self.odd:
            req = self.reqs[i]
            if req.finished_reason is not None and i != self.skipped:
                self._finished(i, req, int(self.lens[i]))
            if req.is_retracted:
                retracted.append(i)
        if self.return_logprob and retracted:
            self.retracted = np.zeros(len(self.reqs), np.uint8)
            self.retracted[retracted] = 1

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

    def odd_rows(self, rows: NDArray[np.int32]) -> list[int]:
        """Rows of `odd`."""
        if not self.odd or rows.shape[1] == len(self.reqs):
            return self.odd
        row_of = dict(zip(rows[C.BATCH_INDEX].tolist(), range(rows.shape[1]), strict=True))
        return [row_of[i] for i in self.odd if i in row_of]
