"""Frames of a stream and a receiver that is handed them, without a socket between."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from frames import Row, Step, frame_of

from gpupack.core import layout as L
from gpupack.core.errors import WireError
from gpupack.transport.stream_reader import StreamReader
from gpupack.transport.stream_table import StreamTable
from gpupack.wire.frame import Frame
from gpupack.wire.metadata import OpeningRecord, SideRecord

FINAL = L.ROW_FINAL | L.ROW_EARLY
WAIT_MS = 10_000


class Stream:
    """Frames of one stream, numbered."""

    def __init__(self, stream_id: int = 1, dp_rank: int = 0) -> None:
        self.stream_id, self.dp_rank, self.frame_no = stream_id, dp_rank, 0

    def frame(
        self, *rows: Row, ended: Sequence[int] = (), dropped: Sequence[int] = (), **openings: OpeningRecord
    ) -> Frame:
        """The next frame; `openings` by rid, of the rows with the opening flag."""
        records = [o for o in openings.values()]
        side = None
        if records or ended or dropped:
            side = SideRecord(openings=records, ended=list(ended), dropped=list(dropped))
        frame = frame_of(
            Step(list(rows), side=side), stream_id=self.stream_id, frame_no=self.frame_no, dp_rank=self.dp_rank
        )
        self.frame_no += 1
        return frame


def opening(
    slot: int, tokens: list[int], rid: str, *, generation: int = 1, row: int = 0, **more: Any
) -> tuple[Any, Any]:
    """A row that opens, and its record."""
    record = OpeningRecord(row=row, rid=rid, **more)
    return Row(slot, generation, tokens, record.tokens_before + len(tokens), L.ROW_OPENING), record


def snapshot(receiver: StreamReader) -> Any:
    """Everything that a frame could change, but for streams that were given up."""

    def state(table: StreamTable) -> dict[str, Any]:
        values = {**vars(table), **vars(table.requests), **vars(table.requests.score_ids)}
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else copy.deepcopy(value)
            for name, value in values.items()
            if name not in ("broken", "requests", "score_ids")
        }

    return {rank: state(table) for rank, table in receiver._tables.items()}


def begin(receiver: StreamReader, stream: Stream, slot: int = 3, rid: str = "a", tokens: int = 2) -> None:
    """Open a request on a stream."""
    row, record = opening(slot, list(range(tokens)), rid)
    assert receiver.take(stream.frame(row, **{rid: record})).deltas()[0].rid == rid


def refuse(receiver: StreamReader, frame: Frame, error: type[WireError], match: str) -> None:
    """The frame raises, and changes nothing."""
    before = snapshot(receiver)
    with pytest.raises(error, match=match):
        receiver.take(frame)
    assert snapshot(receiver) == before
