"""ReceivedStep: one verified frame at the receiver, and the deltas it brings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, repeat
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.wire.frame import Frame, Int32
from gpupack.wire.side import FinishReason, OpeningRecord, SideRecord, finish_reason

SPECIAL_ROW = L.ROW_FINAL | L.ROW_OPENING | L.ROW_RESTARTED


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one row says about its request.

    `logprobs` is None if the frame has none, empty if the request asked for none. `restarted`: what was
    received of the request before is void. `opening` comes with the first row of a request on a stream.
    """

    rid: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason | None
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    restarted: bool
    opening: OpeningRecord | None


class RequestRecord(msgspec.Struct, frozen=True):
    """What a receiver keeps of an open request from its opening record."""

    rid: str
    prompt_tokens: int
    cached_tokens: int


class ReceivedStep:
    """One frame that was taken in.

    Attributes
    ----------
    frame
        Its columns, read-only views of the received message. They keep the message alive: copy what
        is to outlive the step, if memory matters.
    row_requests
        RequestRecord of every row, object array `[rows]`.
    lost
        Rids that this frame adds to `OutputReceiver.lost()`.
    dropped
        Rids of requests that end with this frame, after its rows, without a final row: no more comes of them.
    """

    __slots__ = ("dropped", "frame", "lost", "row_requests")

    def __init__(
        self, frame: Frame, row_requests: NDArray[np.object_], lost: tuple[str, ...], dropped: tuple[str, ...]
    ) -> None:
        self.frame = frame
        self.row_requests = row_requests
        self.lost = lost
        self.dropped = dropped

    def deltas(self) -> list[Delta]:
        """One Delta a row, in row order: Python objects that are independent of the message."""
        frame = self.frame
        tokens = _split(frame.token_ids, frame.token_indptr)
        logprobs: Iterable[list[float] | None] = repeat(None)
        if frame.logprob_indptr is not None and frame.logprobs is not None:
            logprobs = _split(frame.logprobs, frame.logprob_indptr)
        columns = zip(self.row_requests.tolist(), tokens, logprobs, frame.visible_len.tolist(), strict=False)
        deltas = [
            Delta(request.rid, ids, values, None, visible, request.prompt_tokens, request.cached_tokens, False, None)
            for request, ids, values, visible in columns
        ]
        for row, changes in self._special_rows():
            deltas[row] = msgspec.structs.replace(deltas[row], **changes)
        return deltas

    def _special_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows that open, restart or end their request, and the fields in which their deltas differ."""
        frame = self.frame
        side = frame.side if frame.side is not None else SideRecord()
        openings = {opening.row: opening for opening in side.openings}
        finishes = {extra.row: extra.finish for extra in side.extras}
        for row in np.flatnonzero(frame.flags & SPECIAL_ROW).tolist():
            flags = int(frame.flags[row])
            reason = None
            if frame.match is not None:
                reason = finish_reason(flags >> L.ROW_CODE_SHIFT, int(frame.match[row]), finishes.get(row))
            restarted = bool(flags & L.ROW_RESTARTED)
            yield row, {"finish_reason": reason, "restarted": restarted, "opening": openings.get(row)}


def _split(items: NDArray[Any], indptr: Int32) -> list[list[Any]]:
    """The items of each row as a list; at once if every row has as many."""
    rows = len(indptr) - 1
    each = len(items) // rows if rows else 0
    if each * rows == len(items) and np.array_equal(indptr, np.arange(0, len(items) + 1, each or 1)):
        return items.reshape(rows, each).tolist()
    values, offsets = items.tolist(), indptr.tolist()
    return [values[start:end] for start, end in pairwise(offsets)]
