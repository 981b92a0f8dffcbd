"""ReceivedStep: one verified frame at the receiver, and the deltas it brings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.transport.families import split_families, split_items
from gpupack.transport.score_ids import Ids
from gpupack.wire.frame import Frame
from gpupack.wire.metadata import (
    COUNTS,
    CachedTokensDetails,
    FinishReason,
    OpeningRecord,
    RowExtras,
    SideRecord,
    finish_reason,
)

SPECIAL_ROW = L.ROW_FINAL | L.ROW_OPENING | L.ROW_RESTARTED | L.ROW_HIDDEN_TOKEN


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one row says about its request.

    `logprobs` is None if the frame has none, empty if the request asked for none. `restarted`: what was
    received of the request before is void. `opening` comes with the first row of a request on a stream,
    `extras` with rows that have any. Top and token-ids logprobs have an entry for each of `logprobs`; None: the
    request asked for none. `scored_ids` is set where the ids of `logprobs` are not `token_ids`.
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
    extras: RowExtras | None = None
    top_logprobs_val: list[list[float]] | None = None
    top_logprobs_idx: list[list[int]] | None = None
    token_ids_logprobs_val: list[list[float]] | None = None
    scored_ids: Ids | None = None

    @property
    def logprob_ids(self) -> Ids | list[int] | None:
        """The token id of each of `logprobs`; None in place of one that is not known here."""
        if self.scored_ids is not None:
            return self.scored_ids
        if not self.logprobs:
            return None if self.logprobs is None else []
        return self.token_ids


class RequestRecord(msgspec.Struct, frozen=True):
    """What a receiver knows of an open request: its opening record, and the newest of what may change."""

    rid: str
    prompt_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    retraction_counts: int
    image_tokens: int
    audio_tokens: int
    video_tokens: int
    cached_tokens_details: CachedTokensDetails | None
    opening: OpeningRecord
    time_stats: bytes | None = None

    @classmethod
    def of(cls, opening: OpeningRecord) -> RequestRecord:
        """What an opening record tells."""
        told = {name: getattr(opening, name) for name in _TOLD}
        return cls(opening=opening, **told)

    def told(self, extra: RowExtras) -> RequestRecord:
        """The same with what a later row tells; itself if that is nothing."""
        changes: dict[str, Any] = {}
        if extra.counts is not None:
            changes.update(extra.counts.items())
        if extra.cached_tokens_details is not None:
            changes["cached_tokens_details"] = extra.cached_tokens_details
        if extra.time_stats is not None:
            changes["time_stats"] = extra.time_stats
        return msgspec.structs.replace(self, **changes) if changes else self


_TOLD = ("rid", "prompt_tokens", "cached_tokens_details", *COUNTS)  # by opening records, in the same names


class ReceivedStep:
    """One frame that was taken in.

    Attributes
    ----------
    frame
        Its columns, read-only views of the received message. They keep the message alive: copy what
        is to outlive the step, if memory matters.
    row_requests
        RequestRecord of every row, object array `[rows]`, as of this frame.
    lost
        Rids that this frame adds to `OutputReceiver.lost()`.
    dropped
        Rids of requests that end with this frame, after its rows, without a final row: no more comes of them.
    score_ids
        By row, ids of its logprobs where they are not those of its tokens.
    """

    __slots__ = ("dropped", "frame", "lost", "row_requests", "score_ids")

    def __init__(
        self,
        frame: Frame,
        row_requests: NDArray[np.object_],
        lost: tuple[str, ...],
        dropped: tuple[str, ...],
        score_ids: dict[int, Ids],
    ) -> None:
        self.frame = frame
        self.row_requests = row_requests
        self.lost = lost
        self.dropped = dropped
        self.score_ids = score_ids

    @property
    def side(self) -> SideRecord:
        """The frame's side record, an empty one if it has none."""
        return _NO_SIDE if self.frame.side is None else self.frame.side

    def deltas(self) -> list[Delta]:
        """One Delta a row, in row order: Python objects that are independent of the message."""
        frame = self.frame
        tokens = split_items(frame.token_ids, frame.token_indptr)
        logprobs: Iterable[list[float] | None] = repeat(None)
        if frame.logprob_indptr is not None and frame.logprobs is not None:
            logprobs = split_items(frame.logprobs, frame.logprob_indptr)
        columns = zip(self.row_requests.tolist(), tokens, logprobs, frame.visible_len.tolist(), strict=False)
        deltas = [
            Delta(request.rid, ids, values, None, visible, request.prompt_tokens, request.cached_tokens, False, None)
            for request, ids, values, visible in columns
        ]
        for row, changes in self._special_rows(tokens):
            deltas[row] = msgspec.structs.replace(deltas[row], **changes)
        for extra in self.side.extras:
            deltas[extra.row] = msgspec.structs.replace(deltas[extra.row], extras=extra)
        for row, ids in self.score_ids.items():
            deltas[row] = msgspec.structs.replace(deltas[row], scored_ids=ids)
        for row, values in split_families(frame, self.row_requests):
            deltas[row] = msgspec.structs.replace(deltas[row], **values)
        return deltas

    def _special_rows(self, tokens: list[list[int]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows that open, restart or end their request, or have a hidden token: what differs in their deltas."""
        frame, side = self.frame, self.side
        openings = {opening.row: opening for opening in side.openings}
        finishes = {extra.row: extra.finish for extra in side.extras}
        for row in np.flatnonzero(frame.flags & SPECIAL_ROW).tolist():
            flags = int(frame.flags[row])
            reason = None
            if frame.match is not None:
                reason = finish_reason(flags >> L.ROW_CODE_SHIFT, int(frame.match[row]), finishes.get(row))
            restarted = bool(flags & L.ROW_RESTARTED)
            changes: dict[str, Any] = {
                "finish_reason": reason,
                "restarted": restarted,
                "opening": openings.get(row),
            }
            if flags & L.ROW_HIDDEN_TOKEN:
                changes |= {"token_ids": [], "scored_ids": tokens[row]}
            yield row, changes


_NO_SIDE = SideRecord()
