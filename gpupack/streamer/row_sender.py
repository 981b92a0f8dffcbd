"""RowSender: the rows of a packed step, with what goes beside them, as one frame on the socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.errors import SendError
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Request
from gpupack.packer.pending_step import Ticket
from gpupack.packer.slots import SlotTable
from gpupack.streamer.frame_metadata import Carried, SideRecords
from gpupack.streamer.metrics import Metrics
from gpupack.wire.encoder import FrameEncoder

if TYPE_CHECKING:
    from gpupack.transport.sender import OutputSender

NO_HANDLES = np.empty(0, np.int64)

Carry = Callable[[PackedStep], Carried]
"""What the rows of a packed step of embeddings carry."""


class SendReport(NamedTuple):
    """What one step sent: rows, tokens, bytes of the frame (0 without one), handles of final rows int64 `[n]`."""

    rows: int
    tokens: int
    frame_bytes: int
    finished: NDArray[np.int64]


NOTHING_SENT = SendReport(0, 0, 0, NO_HANDLES)


class RowSender:
    """Sends rows; notes in `final`, bool by slot, which handles have had their last one.

    `log_time_stats`, if not None, is called with each request of a generation whose final row is sent.
    """

    def __init__(
        self,
        slots: SlotTable,
        sender: OutputSender,
        side_records: SideRecords,
        metrics: Metrics,
        final: NDArray[np.bool_],
        log_time_stats: Callable[[Request], None] | None,
    ) -> None:
        self._final = final
        self._slots = slots
        self._sender = sender
        self._side_records = side_records
        self._metrics = metrics
        self._log_time_stats = log_time_stats
        self._encoder = FrameEncoder(dp_rank=sender.dp_rank, max_frame_bytes=sender.max_frame_bytes)

    def send(self, packed: PackedStep, ticket: Ticket, launch: int, idle: bool, carry: Carry | None) -> SendReport:
        """Send the rows of a step, or nothing without rows unless the batch is idle; see OutputStreamer.send.

        `carry` gives what the rows of an embedding batch carry.
        """
        count = packed.rows
        if not (count or idle):
            return NOTHING_SENT
        slots = packed.column(L.R_SLOT)
        finished = NO_HANDLES
        if packed.header(L.H_FINISHED):
            final_rows = np.flatnonzero(packed.column(L.R_FLAGS) & L.ROW_FINAL)
            finished = packed.handles[final_rows]
            self._final[slots[final_rows]] = True
            if self._log_time_stats is not None and carry is None:
                self._log(slots[final_rows], self._log_time_stats)
        carried = None if carry is None else carry(packed)
        row_flags, side = self._side_records.build(packed, slots, ticket, carried)
        frame = self._encoder.encode(packed, step=launch, row_flags=row_flags, side=side, idle=not count)
        self._metrics.count_frame(len(frame))
        self._metrics.dropped_extras = self._side_records.dropped
        report = SendReport(count, packed.header(L.H_TOKENS), len(frame), finished)
        try:
            self._sender.send(frame, peer_checked=True)
        except SendError as error:
            error.report = report
            raise
        return report

    def _log(self, slots: NDArray[np.int32], log: Callable[[Request], None]) -> None:
        for slot in slots.tolist():
            request = self._slots.requests[slot]
            assert request is not None, "rows of ended handles are dropped when a step is taken in"
            log(request)
