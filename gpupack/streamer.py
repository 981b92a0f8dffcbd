"""OutputStreamer: conveyed rows, opening records, extras, sending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.checks import host_array
from gpupack.control import Control
from gpupack.errors import InputError
from gpupack.gate import Conveyed, Gate
from gpupack.metrics import Metrics
from gpupack.packed import PackedStep
from gpupack.packer import Packer, Ticket
from gpupack.request import FinishReason, Request, Resume
from gpupack.stop_strings import StopStringJudge
from gpupack.wire.encoder import FrameEncoder
from gpupack.wire.side import OpeningRecord, RowExtras, SideRecord, encode_side

if TYPE_CHECKING:
    from gpupack.transport.sender import OutputSender


_NO_HANDLES = np.empty(0, np.int64)

UNNAMED_END: FinishReason = {"type": "abort", "message": "Aborted", "status_code": 500, "err_type": "Aborted"}
"""The reason of a request that the engine ends without setting `Request.finish_reason`."""


class SendReport(NamedTuple):
    """What one step sent: rows, tokens, bytes of the frame (0 without one), handles of final rows int64 `[n]`."""

    rows: int
    tokens: int
    frame_bytes: int
    finished: NDArray[np.int64]


class OutputStreamer:
    """Turns packed steps into frames on a socket; knows each request from opening record to final row.

    One streamer per packer and sender, one thread for all three. Host-judged requests go through its
    gate: the stop-string judge for `judge="host"`, the engine's control for `judge="engine"`.
    """

    def __init__(
        self, packer: Packer, sender: OutputSender, *, judge: StopStringJudge | None = None, dp_rank: int = 0
    ) -> None:
        capacity = packer.config.capacity
        self.packer = packer
        self.sender = sender
        self.judge = judge
        self.metrics = Metrics()
        self._encoder = FrameEncoder(dp_rank=dp_rank)
        self._gate: Gate | None = None
        self._gate_control = Control(packer.config.batch_capacity)
        self._judged_here = np.zeros(capacity, np.bool_)  # slot: the stop-string judge looks at it
        self._gated = np.zeros(capacity, np.bool_)  # slot: goes through the gate
        self._opened = np.zeros(capacity, np.bool_)  # slot: opening record sent on this stream
        self._unopened = 0  # handles among the live ones that are not opened
        self._known = np.zeros(capacity, np.bool_)  # slot: a row was sent, on this stream or under an earlier handle
        self._restarted = np.zeros(capacity, np.bool_)  # slot: next row tells the receiver to discard
        self._final = np.zeros(capacity, np.bool_)  # slot: final row sent
        self._ended: list[int] = []  # handles that ended without a final row, to be told in the next frame

    # --- life of a request ------------------------------------------------------------------------

    def admit(self, requests: Sequence[Request], resume: Sequence[Resume | None] | None = None) -> NDArray[np.int64]:
        """Begin requests, int64 `[n]` handles; see Packer.admit. `resume` takes what `retract` gave."""
        eos = self.packer.config.eos_token_ids
        judges = [request.judged_by(eos) for request in requests]
        if "host" in judges and self.judge is None:
            rid = requests[judges.index("host")].rid
            raise InputError(f"judge: {rid} is host-judged, expected a StopStringJudge at the streamer, got None")
        handles = self.packer.admit(requests, resume)
        resumes = [entry or Resume() for entry in resume or [None] * len(requests)]
        slots = handles & 0xFFFFFFFF
        self._opened[slots] = self._final[slots] = False
        self._unopened += len(slots)
        self._known[slots] = [entry.opened for entry in resumes]
        self._restarted[slots] = [entry.restarted for entry in resumes]
        self._judged_here[slots] = [judge == "host" for judge in judges]
        gated = np.array([judge != "device" for judge in judges], np.bool_) & self.packer.convey
        self._gated[slots] = gated
        chosen = np.flatnonzero(gated).tolist()
        if chosen:
            self._gate = self._gate or Gate(self.packer.config)
            self._gate.admit(handles[gated], [requests[i] for i in chosen], [resumes[i] for i in chosen])
        for i, judge in enumerate(judges):
            if judge == "host" and self.judge is not None:
                self.judge.admit(int(handles[i]), requests[i], resumes[i])
        return handles

    def retire(self, handles: Any) -> None:
        """End handles, int64 `[n]`: after their final row, or to drop requests without one."""
        handles = host_array("handles", handles, (np.int64,), (1,))
        self.packer.retire(handles)
        self._forget(handles, resumable=False)

    def retract(self, handle: int, *, output_len: int | None = None) -> Resume:
        """End a handle whose request will come back; what to pass to `admit(resume=)`. See Packer.retract."""
        slot = int(self.packer.slots.slots_of(np.array([handle], np.int64))[0])
        opened = bool(self._known[slot])
        if self._gated[slot]:
            assert self._gate is not None
            if self._final[slot]:
                raise InputError(f"handle: expected a running request, {handle} has sent its final row; retire it")
            resume = self._gate.retract(slot)
            self.packer.retire(np.array([handle], np.int64))
        else:
            resume = self.packer.retract(handle, output_len=output_len)
        self._forget(np.array([handle], np.int64), resumable=True)
        return replace(resume, opened=opened)

    def abort(self, handles: Any, reason: FinishReason) -> Ticket:
        """End running requests now: what was accepted before is in their final rows, what comes later is not.

        Returns a ticket to `send` in its turn, after the steps that were launched before.
        """
        handles = host_array("handles", handles, (np.int64,), (1,))
        slots = self.packer.slots.slots_of(handles)
        control = Control(len(slots)).reset(len(slots))
        for row, slot in enumerate(slots.tolist()):
            request = self.packer.slots.requests[slot]
            assert request is not None
            request.finish_reason = reason
            control.finish(row, L.FINISH_HOST)
        return self.packer.pack(handles, control=control)

    def reopen(self, endpoint: str | None = None) -> None:
        """Start a new stream, to the same or another receiver; every live request opens again on it."""
        self.sender.reopen(endpoint)
        self._opened[:] = False
        self._unopened = len(self.packer.slots)
        self._ended.clear()
        self.metrics.reopened += 1

    def close(self) -> None:
        """Send the steps in flight, then close packer and sender; what waits goes as far as the time-out allows."""
        try:
            for ticket in self.packer.in_flight:
                self.send(ticket)
        finally:
            self.packer.close()
            self.sender.close()

    # --- sending ----------------------------------------------------------------------------------

    def send(self, ticket: Ticket, *, idle: bool = False) -> SendReport:
        """Take in a step, judge what is conveyed, and send its rows as one frame.

        No rows: no frame, unless the batch is `idle`. The engine's control for conveyed rows is the
        one that the step was launched with. Raises PeerLostError before the step is taken in, so that
        it can be sent again after `reopen()`; BackpressureError after, with everything kept.
        """
        self.sender.check_peer()
        packed = ticket.wait()
        gated = joined = None
        try:
            rows = packed
            if packed.header(L.H_CONVEYED):
                gated = self._judge(packed, ticket)
                all_gated = packed.header(L.H_CONVEYED) == packed.rows
                assert self._gate is not None
                rows = gated if all_gated else (joined := self._gate.join(packed, gated))
            return self._send_rows(rows, packed.header(L.H_LAUNCH), idle)
        finally:
            for step in (packed, gated, joined):
                if step is not None:
                    step.release()

    def _judge(self, packed: PackedStep, ticket: Ticket) -> PackedStep:
        assert self._gate is not None
        conveyed = Conveyed(packed)
        here = np.flatnonzero(self._judged_here[conveyed.slots] & ~self._final[conveyed.slots])
        control = None
        if ticket.control is not None or len(here):
            control = self._gate_control.reset(len(conveyed.rows))
            if ticket.control is not None:
                control.words[:] = ticket.control.words[:, conveyed.batch_rows]
            if len(here):
                assert self.judge is not None
                self.judge.judge(conveyed, here.tolist(), control)
        return self._gate.pack(conveyed, control, ticket.mode)

    def _send_rows(self, packed: PackedStep, launch: int, idle: bool) -> SendReport:
        count = packed.rows
        self.metrics.count_step(packed)
        self.metrics.dropped_rows = self.packer.dropped_rows
        finished = _NO_HANDLES
        size = 0
        if count or idle:
            slots = packed.column(L.R_SLOT)
            finals = packed.header(L.H_FINISHED)
            row_flags, side = self._side(packed, slots, finals)
            if finals:
                final_rows = np.flatnonzero(packed.column(L.R_FLAGS) & L.ROW_FINAL)
                finished = packed.handles[final_rows]
                self._final[slots[final_rows]] = True
            frame = self._encoder.encode(packed, step=launch, row_flags=row_flags, side=side, idle=idle)
            size = len(frame)
            self.metrics.count_frame(size)
            self.sender.send(frame, peer_checked=True)
        return SendReport(count, packed.header(L.H_TOKENS), size, finished)

    def _side(
        self, packed: PackedStep, slots: NDArray[np.int32], finals: int
    ) -> tuple[NDArray[np.int32] | None, bytes]:
        """Row flags and side record: opening records of first rows, reasons of the host, ended handles."""
        opening = np.flatnonzero(~self._opened[slots]) if self._unopened else slots[:0]
        extras: list[RowExtras] = []
        if finals:
            codes = packed.column(L.R_FLAGS) >> L.ROW_CODE_SHIFT
            for row in np.flatnonzero(codes >= L.FINISH_STOP_STRING).tolist():
                extras.append(RowExtras(row=row, finish=self._request(slots, row).finish_reason or UNNAMED_END))
        if not (len(opening) or extras or self._ended):
            return None, b""
        row_flags = np.zeros(packed.rows, np.int32)
        row_flags[opening] = L.ROW_OPENING
        row_flags[opening[self._restarted[slots[opening]]]] |= L.ROW_RESTARTED
        starts = packed.column(L.R_TOKEN_START)
        openings = [self._opening(slots, row, int(starts[row])) for row in opening.tolist()]
        side = encode_side(SideRecord(openings=openings, extras=extras, ended=self._ended))
        self._opened[slots[opening]] = self._known[slots[opening]] = True
        self._unopened -= len(opening)
        self._restarted[slots[opening]] = False
        self._ended = []
        return row_flags, side

    def _opening(self, slots: NDArray[np.int32], row: int, start: int) -> OpeningRecord:
        request = self._request(slots, row)
        slot = int(slots[row])
        return OpeningRecord(
            row=row,
            rid=request.rid,
            worker=request.http_worker_ipc,
            decoded_text=request.decoded_text,
            prompt_tail=request.prompt_tail,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
            no_stop_trim=request.no_stop_trim,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            tokens_before=start,
            resumed=bool(self._known[slot]),
        )

    def _request(self, slots: NDArray[np.int32], row: int) -> Request:
        request = self.packer.slots.requests[int(slots[row])]
        assert request is not None, "rows of ended handles are dropped when a step is taken in"
        return request

    def _forget(self, handles: NDArray[np.int64], *, resumable: bool) -> None:
        slots = handles & 0xFFFFFFFF
        self._ended += handles[self._opened[slots] & ~self._final[slots]].tolist()
        self._unopened -= int(np.count_nonzero(~self._opened[slots]))
        gated = slots[self._gated[slots]]
        if len(gated):
            assert self._gate is not None
            self._gate.end(gated)
        for handle in handles[self._judged_here[slots]].tolist():
            assert self.judge is not None
            self.judge.end(handle, resumable=resumable)
