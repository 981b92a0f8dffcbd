"""SideRecords: what each frame says beside its columns, and which rows it marks for that."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.host_columns import HostColumns
from gpupack.openings import Openings
from gpupack.packed import PackedStep
from gpupack.request import FinishReason, is_reason
from gpupack.slots import SlotTable
from gpupack.ticket import Ticket
from gpupack.wire.side import RowExtras, SideRecord, encode_side

UNNAMED_END: FinishReason = {"type": "abort", "message": "Aborted", "status_code": 500, "err_type": "Aborted"}
"""The reason of a request that the engine ends without one, or with one that cannot travel."""

RowFields = dict[int, dict[str, Any]]
"""By row, fields of RowExtras."""

Carried = tuple[RowFields, dict[str, Any]]
"""What an embedding frame carries: fields of its rows' extras, and further fields of SideRecord."""


class SideRecords:
    """Opening records of first rows, extras of rows that have any, handles that ended, columns that are returned."""

    def __init__(self, slots: SlotTable, openings: Openings, columns: HostColumns) -> None:
        self._slots = slots
        self._openings = openings
        self._columns = columns

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
        told = packed.header(L.H_FINISHED) or columns.waiting or columns.asking or carried is not None
        if not (told or len(opening) or ended or dropped):
            return None, b""
        fields, parts = carried or ({}, {})
        reasons = self._reasons(packed, slots, ticket) if packed.header(L.H_FINISHED) else {}
        row_flags, records = None, []
        if len(opening):
            row_flags = np.zeros(packed.rows, np.int32)
            records = openings.open(opening, slots, packed.column(L.R_TOKEN_START), row_flags)
        taken = columns.take(packed, slots, scores=packed.has_logprobs)
        extras = _row_extras([by_row for by_row in (reasons, taken, fields) if by_row])
        if columns.asking and ticket.handles is not None:
            returned = columns.returned(ticket.handles, ticket.control)
            parts = {**parts, "returned": returned} if returned else parts
        if not (records or extras or ended or dropped or parts):
            return None, b""
        side = encode_side(SideRecord(openings=records, extras=extras, ended=ended, dropped=dropped, **parts))
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


def _row_extras(sources: list[RowFields]) -> list[RowExtras]:
    """The extras of all rows that have any, rows rising."""
    joined: RowFields = {}
    for by_row in sources:
        for row, fields in by_row.items():
            joined[row] = {**joined.get(row, {}), **fields}
    return [RowExtras(row=row, **joined[row]) for row in sorted(joined)]
