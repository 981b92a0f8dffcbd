"""SideRecords: what each frame says beside its columns, and which rows it marks for that."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import FinishReason, is_reason
from gpupack.packer.pending_step import Ticket
from gpupack.packer.slots import SlotTable
from gpupack.streamer.frame_room import SIDE_BYTES
from gpupack.streamer.host_columns import HostColumns
from gpupack.streamer.new_requests import Openings
from gpupack.wire.encoder import frame_bytes
from gpupack.wire.metadata import RowExtras, SideRecord, encode_side

UNNAMED_END: FinishReason = {"type": "abort", "message": "Aborted", "status_code": 500, "err_type": "Aborted"}
"""The reason of a request that the engine ends without one, or with one that cannot travel."""

RowFields = dict[int, dict[str, Any]]
"""By row, fields of RowExtras."""

Carried = tuple[RowFields, dict[str, Any]]
"""What an embedding frame carries: fields of its rows' extras, and further fields of SideRecord."""


class SideRecords:
    """Opening records of first rows, extras of rows that have any, handles that ended, columns that are returned.

    Extras take what their frame leaves of `max_frame_bytes`; `dropped` counts the rows of which some were lost.
    """

    def __init__(self, slots: SlotTable, openings: Openings, columns: HostColumns, max_frame_bytes: int) -> None:
        self._slots = slots
        self._openings = openings
        self._columns = columns
        self._max_frame_bytes = max_frame_bytes
        self._unnamed = 0

    @property
    def dropped(self) -> int:
        """Rows so far whose extras, or some of them, found no room in a frame."""
        return self._columns.dropped + self._unnamed

    def build(
        self,
        packed: PackedStep,
        slots: NDArray[np.int32],
        ticket: Ticket,
        carried: Carried | None = None,
    ) -> tuple[NDArray[np.int32] | None, bytes]:
        """Row flags, int32 `[rows]` or None, and encoded side record of a step; what it tells counts as told.

        `slots` is the step's column. A step that has nothing to tell costs a few look-ups for all rows together.
        """
        openings, columns = self._openings, self._columns
        opening = openings.rows_to_open(slots)
        ended, dropped = openings.ended, openings.dropped
        any_extras = packed.header(L.H_FINISHED) or columns.waiting or columns.asking or carried is not None
        if not (any_extras or len(opening) or ended or dropped):
            return None, b""
        fields, parts = carried or ({}, {})
        reasons = self._reasons(packed, slots, ticket) if packed.header(L.H_FINISHED) else {}
        row_flags, records = None, []
        if len(opening):
            row_flags = np.zeros(packed.rows, np.int32)
            records = openings.open(opening, slots, packed.column(L.R_TOKEN_START), row_flags)
        told = {"openings": records, "ended": ended, "dropped": dropped, **parts}
        taken: RowFields = {}
        if columns.waiting:
            used = frame_bytes(packed, len(msgspec.msgpack.encode([told, reasons, fields])) + SIDE_BYTES)
            taken = columns.take(packed, slots, self._max_frame_bytes - used, scores=packed.has_logprobs)
        if columns.asking:
            told["returned"] = columns.returned(ticket.handles, ticket.control)
        if not (reasons or taken or fields or any(told.values())):
            return None, b""
        side = _encoded(told, reasons, taken, fields)
        if len(side) > columns.room and frame_bytes(packed, len(side)) > self._max_frame_bytes:
            # Only reasons can be so long; the requests end without them all the same.
            self._unnamed += len(reasons.keys() | taken.keys())
            side = _encoded(told, {row: {"finish": UNNAMED_END} for row in reasons}, fields)
        openings.ended, openings.dropped = [], []
        return row_flags, side

    def _reasons(self, packed: PackedStep, slots: NDArray[np.int32], ticket: Ticket) -> RowFields:
        """The reasons of the final rows that the host ended."""
        handles = packed.handles
        fields: RowFields = {}
        codes = packed.column(L.R_FLAGS) >> L.ROW_CODE_SHIFT
        for row in np.flatnonzero(codes >= L.FINISH_STOP_STRING).tolist():
            request = self._slots.requests[int(slots[row])]
            reason = ticket.reasons.get(int(handles[row])) or (request.finish_reason if request else None)
            fields[row] = {"finish": reason if is_reason(reason) else UNNAMED_END}
        return fields


def _encoded(told: dict[str, Any], *sources: RowFields) -> bytes:
    """The side record of `told` and of the extras of all rows that have any, rows rising."""
    joined: RowFields = {}
    for by_row in sources:
        for row, fields in by_row.items():
            joined[row] = {**joined.get(row, {}), **fields}
    extras = [RowExtras(row=row, **joined[row]) for row in sorted(joined)]
    return encode_side(SideRecord(extras=extras, **told))
