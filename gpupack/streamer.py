"""OutputStreamer: conveyed rows, opening records, extras, sending."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.checks import host_array
from gpupack.control import Control
from gpupack.errors import ConfigError, InputError, SendError
from gpupack.gate import Conveyed, Gate
from gpupack.metrics import Metrics
from gpupack.openings import Openings
from gpupack.packed import PackedStep
from gpupack.packer import Packer, Ticket
from gpupack.request import FinishReason, Request, Resume, is_reason
from gpupack.stop_strings import StopStringJudge
from gpupack.wire.encoder import FrameEncoder, largest_frame
from gpupack.wire.side import RowExtras, SideRecord, encode_side

if TYPE_CHECKING:
    from gpupack.transport.sender import OutputSender

_NO_HANDLES = np.empty(0, np.int64)

UNNAMED_END: FinishReason = {"type": "abort", "message": "Aborted", "status_code": 500, "err_type": "Aborted"}
"""The reason of a request that the engine ends without one, or with one that cannot travel."""


class SendReport(NamedTuple):
    """What one step sent: rows, tokens, bytes of the frame (0 without one), handles of final rows int64 `[n]`."""

    rows: int
    tokens: int
    frame_bytes: int
    finished: NDArray[np.int64]


class OutputStreamer:
    """Turns packed steps into frames on a socket; knows each request from opening record to final row.

    One streamer per packer and sender, one thread for all three. Host-judged requests go through its
    gate: the stop-string judge for `judge="host"`, the engine's control for `judge="engine"`. Data-parallel
    rank and maximum frame size are the sender's. ConfigError if the packer's fullest step does not fit one.
    """

    def __init__(self, packer: Packer, sender: OutputSender, *, judge: StopStringJudge | None = None) -> None:
        config = packer.config
        largest = largest_frame(config.batch_capacity, config.max_items, config.logprobs)
        if largest > sender.max_frame_bytes:
            raise ConfigError(f"max_frame_bytes: the fullest step needs {largest}, got {sender.max_frame_bytes}")
        self.packer = packer
        self.sender = sender
        self.judge = judge
        self.metrics = Metrics()
        self._encoder = FrameEncoder(dp_rank=sender.dp_rank, max_frame_bytes=sender.max_frame_bytes)
        self._openings = Openings(packer.slots)
        self._gate: Gate | None = None
        self._gate_control = Control(config.batch_capacity)
        self._judged_here = np.zeros(config.capacity, np.bool_)  # slot: the stop-string judge looks at it
        self._gated = np.zeros(config.capacity, np.bool_)  # slot: goes through the gate
        self._final = np.zeros(config.capacity, np.bool_)  # slot: final row sent

    def __enter__(self) -> OutputStreamer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- life of a request ------------------------------------------------------------------------

    def admit(self, requests: Sequence[Request], resume: Sequence[Resume | None] | None = None) -> NDArray[np.int64]:
        """Begin requests, int64 `[n]` handles; see Packer.admit. `resume` takes what `retract` gave."""
        judges = [request.judged_by(self.packer.config.eos_token_ids) for request in requests]
        if "host" in judges and (self.judge is None or not self.packer.convey):
            rid = requests[judges.index("host")].rid
            missing = "a StopStringJudge at the streamer" if self.packer.convey else "Packer(convey=True)"
            raise InputError(f"judge: {rid} is host-judged, expected {missing}")
        handles = self.packer.admit(requests, resume)
        resumes = [entry or Resume() for entry in resume or [None] * len(requests)]
        slots = handles & 0xFFFFFFFF
        self._openings.admit(slots, resumes)
        self._final[slots] = False
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
        """End a handle whose request will come back; what to pass to `admit(resume=)`. See Packer.retract.

        For a request that the host or the engine judges, what was taken in is what counts; `output_len`,
        if given, must say the same.
        """
        handles = np.array([handle], np.int64)
        slot = int(self.packer.slots.slots_of(handles)[0])
        if self._gated[slot]:
            assert self._gate is not None
            resume = self._gate.retract(slot, output_len)
            self.packer.retire(handles)
        else:
            resume = self.packer.retract(handle, output_len=output_len)
        watches = self._forget(handles, resumable=True)
        return self._openings.resume(slot, resume, watches[0] if watches else None)

    def abort(self, handles: Any, reason: FinishReason) -> Ticket:
        """End running requests now: what was accepted before is in their final rows, what comes later is not.

        Returns a ticket to `send` in its turn, after the steps that were launched before.
        """
        if not is_reason(reason):
            raise InputError(f"reason: expected a dict with a type, of strings and numbers, got {reason!r}")
        handles = host_array("handles", handles, (np.int64,), (1,))
        self.packer.slots.slots_of(handles)
        control = Control(len(handles)).reset(len(handles))
        for row in range(len(handles)):
            control.finish(row, L.FINISH_HOST)
        ticket = self.packer.pack(handles, control=control)
        ticket.reasons.update(dict.fromkeys(handles.tolist(), reason))
        return ticket

    def reopen(self, endpoint: str | None = None) -> None:
        """Start a new stream, to the same or another receiver; every live request opens again on it.

        What was handed to the old receiver, or waited for it, is not sent again.
        """
        self.sender.reopen(endpoint)
        self._openings.reopen()
        self.metrics.reopened += 1

    def close(self) -> None:
        """Send the steps in flight, then close packer and sender; what waits goes as far as the time-out allows.

        The first SendError of those steps is raised after everything was closed.
        """
        failed: SendError | None = None
        try:
            for ticket in self.packer.in_flight:
                try:
                    self.send(ticket)
                except SendError as error:
                    failed = failed or error
        finally:
            self.packer.close()
            self.sender.close()
        if failed is not None:
            raise failed

    # --- sending ----------------------------------------------------------------------------------

    def send(self, ticket: Ticket, *, idle: bool = False) -> SendReport:
        """Take in a step, judge what is conveyed, and send its rows as one frame.

        No rows: no frame, unless the batch is `idle`. The engine's control for conveyed rows is the
        one that the step was launched with.

        Raises
        ------
        PeerLostError
            Without a `report`: the step was not taken in, send it again after `reopen()`. With one: the
            receiver went while the send waited for it, and the step is lost with what waited.
        BackpressureError
            Everything is kept and goes out later; `report` says what the step finished.

        Anything else that goes wrong after the step was taken in closes the packer: the receiver would
        be left with a hole.
        """
        self.sender.check_peer()
        packed = ticket.wait()
        gated = joined = None
        try:
            rows = packed
            if packed.header(L.H_CONVEYED):
                assert self._gate is not None
                gated = self._judge(packed, ticket)
                all_gated = packed.header(L.H_CONVEYED) == packed.rows
                rows = gated if all_gated else (joined := self._gate.join(packed, gated, ticket.mode))
            self.metrics.count_step(rows, packed)
            self.metrics.dropped_rows = self.packer.dropped_rows
            return self._send_rows(rows, ticket, packed.header(L.H_LAUNCH), idle)
        except SendError:
            raise
        except BaseException:
            self.packer.close()
            raise
        finally:
            for step in (packed, gated, joined):
                if step is not None:
                    step.release()

    def _judge(self, packed: PackedStep, ticket: Ticket) -> PackedStep:
        assert self._gate is not None
        conveyed = Conveyed(packed)
        here = np.flatnonzero(self._judged_here[conveyed.slots])
        control = None
        if ticket.control is not None or len(here):
            control = self._gate_control.reset(len(conveyed.rows))
            if ticket.control is not None:
                control.words[:] = ticket.control[:, conveyed.batch_rows]
                self._gate.fit(conveyed, control, ticket.mode)
            if len(here):
                assert self.judge is not None
                running = here[~self._gate.finished(conveyed.slots[here])]
                self.judge.judge(conveyed, running.tolist(), control)
        return self._gate.pack(conveyed, control, ticket.mode)

    def _send_rows(self, packed: PackedStep, ticket: Ticket, launch: int, idle: bool) -> SendReport:
        count = packed.rows
        if not (count or idle):
            return SendReport(0, 0, 0, _NO_HANDLES)
        slots = packed.column(L.R_SLOT)
        finished = _NO_HANDLES
        if packed.header(L.H_FINISHED):
            final_rows = np.flatnonzero(packed.column(L.R_FLAGS) & L.ROW_FINAL)
            finished = packed.handles[final_rows]
            self._final[slots[final_rows]] = True
        row_flags, side = self._side(packed, slots, ticket)
        frame = self._encoder.encode(packed, step=launch, row_flags=row_flags, side=side, idle=not count)
        self.metrics.count_frame(len(frame))
        report = SendReport(count, packed.header(L.H_TOKENS), len(frame), finished)
        try:
            self.sender.send(frame, peer_checked=True)
        except SendError as error:
            error.report = report
            raise
        return report

    def _side(
        self, packed: PackedStep, slots: NDArray[np.int32], ticket: Ticket
    ) -> tuple[NDArray[np.int32] | None, bytes]:
        """Row flags and side record: opening records of first rows, reasons of the host, ended handles."""
        opening = self._openings.rows_to_open(slots)
        extras = self._reasons(packed, slots, ticket) if packed.header(L.H_FINISHED) else []
        ended, dropped = self._openings.ended, self._openings.dropped
        if not (len(opening) or extras or ended or dropped):
            return None, b""
        row_flags = np.zeros(packed.rows, np.int32)
        openings = self._openings.open(opening, slots, packed.column(L.R_TOKEN_START), row_flags)
        side = encode_side(SideRecord(openings=openings, extras=extras, ended=ended, dropped=dropped))
        self._openings.ended, self._openings.dropped = [], []
        return row_flags, side

    def _reasons(self, packed: PackedStep, slots: NDArray[np.int32], ticket: Ticket) -> list[RowExtras]:
        """The reasons of the final rows that the host ended."""
        handles = packed.handles
        extras = []
        codes = packed.column(L.R_FLAGS) >> L.ROW_CODE_SHIFT
        for row in np.flatnonzero(codes >= L.FINISH_STOP_STRING).tolist():
            request = self.packer.slots.requests[int(slots[row])]
            reason = ticket.reasons.get(int(handles[row])) or (request.finish_reason if request else None)
            extras.append(RowExtras(row=row, finish=reason if is_reason(reason) else UNNAMED_END))
        return extras

    def _forget(self, handles: NDArray[np.int64], *, resumable: bool) -> list[Any]:
        """End handles here; what the judge remembered of those it looked at."""
        slots = handles & 0xFFFFFFFF
        self._openings.end(handles, self._final[slots], resumable=resumable)
        gated = slots[self._gated[slots]]
        if len(gated):
            assert self._gate is not None
            self._gate.end(gated)
        here = handles[self._judged_here[slots]].tolist()
        self._gated[slots] = self._judged_here[slots] = False
        return [self.judge.end(handle) for handle in here if self.judge is not None]
