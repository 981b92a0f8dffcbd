"""OutputStreamer: the steps of a packer, judged and sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from gpupack.core import layout as L
from gpupack.core.array_checks import check_rows, host_array
from gpupack.core.config import crash_after_stream_outputs
from gpupack.core.errors import ConfigError, CrashRequestedError, InputError, SendError
from gpupack.core.request import FinishReason, Request
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket
from gpupack.streamer.embedding_batch import EmbeddingBatch
from gpupack.streamer.frame_metadata import SideRecords
from gpupack.streamer.metrics import Metrics
from gpupack.streamer.row_sender import NOTHING_SENT, Carry, RowSender, SendReport
from gpupack.streamer.streamed_requests import StreamedRequests
from gpupack.text.stop_strings import StopStringJudge
from gpupack.wire.encoder import largest_frame

if TYPE_CHECKING:
    from gpupack.streamer.embeddings import EmbeddingGather
    from gpupack.transport.sender import OutputSender

__all__ = ["OutputStreamer", "SendReport"]


class OutputStreamer(StreamedRequests):
    """Turns packed steps into frames on a socket; knows each request from opening record to final row.

    One streamer per packer and sender, one thread for all three. Host-judged requests go through its
    gate: the stop-string judge for `judge="host"`, the engine's control for `judge="engine"`. Data-parallel
    rank and maximum frame size are the sender's. ConfigError if the packer's fullest step does not fit one.

    Parameters
    ----------
    packer, sender
        Without a sender, on the ranks that do not own the socket, nothing is packed or sent.
    judge
        Finds stop strings; needed if a request is judged by "host".
    whole_hidden_states
        Each row carries all hidden states so far, as SGLang's does; else only those not yet sent.
    disaggregated_decode
        This is the decode server of a disaggregated pair, which does not send input logprobs.
    gather
        Takes the rows of finished requests out of pooled outputs; needed for embeddings that are tensors.
    log_time_stats, attn_tp_rank
        Called with each request whose final row is sent, on the step that sends it, if the rank is 0.
    """

    def __init__(
        self,
        packer: Packer,
        sender: OutputSender | None,
        *,
        judge: StopStringJudge | None = None,
        whole_hidden_states: bool = False,
        disaggregated_decode: bool = False,
        gather: EmbeddingGather | None = None,
        log_time_stats: Callable[[Request], None] | None = None,
        attn_tp_rank: int = 0,
    ) -> None:
        config = packer.config
        largest = largest_frame(config.batch_capacity, config.packed_shape)
        if sender is not None and largest > sender.max_frame_bytes:
            raise ConfigError(f"max_frame_bytes: the fullest step needs {largest}, got {sender.max_frame_bytes}")
        super().__init__(
            packer,
            judge,
            whole_hidden_states=whole_hidden_states,
            disaggregated_decode=disaggregated_decode,
            max_frame_bytes=None if sender is None else sender.max_frame_bytes,
        )
        self.sender = sender
        self.gather = gather
        self.metrics = Metrics()
        self._rows: RowSender | None = None
        if sender is not None:
            side_records = SideRecords(packer.slots, self._openings, self._columns, sender.max_frame_bytes)
            log = log_time_stats if attn_tp_rank == 0 else None
            self._rows = RowSender(packer.slots, sender, side_records, self.metrics, self._final, log)
        self._calls, self._crash_after = 0, crash_after_stream_outputs()

    def __enter__(self) -> OutputStreamer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- life of a stream -------------------------------------------------------------------------

    def reopen(self, endpoint: str | None = None) -> None:
        """Start a new stream, to the same or another receiver; every live request opens again on it.

        What was handed to the old receiver, or waited for it, is not sent again.
        """
        if self.sender is None:
            return
        self.sender.reopen(endpoint)
        self._openings.reopen()
        self.metrics.reopened += 1

    def close(self) -> None:
        """Send the steps in flight, then close packer and sender; what waits goes as far as the time-out allows.

        The first SendError of those steps is raised after everything was closed.
        """
        failed: SendError | None = None
        try:
            for ticket in self.packer.in_flight if self.sender is not None else ():
                try:
                    self.send(ticket)
                except SendError as error:
                    failed = failed or error
        finally:
            self.packer.close()
            if self.sender is not None:
                self.sender.close()
        if failed is not None:
            raise failed

    # --- sending ----------------------------------------------------------------------------------

    def stream_output(
        self,
        handles: Any,
        return_logprob: bool,
        skip_handle: int | None = None,
        *,
        control: Control | None = None,
        is_idle_batch: bool = False,
    ) -> SendReport:
        """Pack and send what is due of a batch, int64 `[B]` handles: `Packer.pack`, then `send`.

        `skip_handle` is left alone, cursors and all. Does nothing without a sender. InputError, and no change,
        while a step is in flight. CrashRequestedError, after sending, if the environment asks for it
        (`config.crash_after_stream_outputs`); idle batches do not count.
        """
        if self.sender is None:
            return NOTHING_SENT
        self._check_nothing_in_flight("stream_output")
        handles = host_array("handles", handles, (np.int64,), (1,))
        if skip_handle is not None:
            asked = control
            control = Control(len(handles)).reset(len(handles))
            if asked is not None:
                check_rows("control", asked.words.T, len(handles))
                control.words[:] = asked.words
            control.flags[handles == skip_handle] |= L.CONTROL_SKIP
        ticket = self.packer.pack(handles, control=control, return_logprob=return_logprob)
        report = self.send(ticket, idle=is_idle_batch)
        if not is_idle_batch:
            self._count_call()
        return report

    def stream_embeddings(
        self,
        handles: Any,
        embeddings: Any,
        *,
        finished: Any = None,
        reasons: Sequence[FinishReason | None] | None = None,
        pooled_hidden_states: Any = None,
    ) -> SendReport:
        """Send the finished requests of a batch of an embedding or reward model, one row each, as one frame.

        Once per request, and nothing if none has finished; under a policy with `send_empty` a frame goes in any
        case, and a request that is given again is sent again. Waits for a gather on a device; all arguments may
        be changed afterwards. Does nothing without a sender.

        Parameters
        ----------
        handles
            int64 `[B]`, as for `Packer.step`.
        embeddings
            `[B, width]` of `gather`'s dtype, on its device or on the host; or a list of B entries, each a list of
            numbers or of such lists, a sparse `{index: number}`, a number, or None.
        finished
            bool `[B]`, which have finished; None: all. Nothing happens to the others, nor is theirs looked at.
        reasons
            B entries, why they did; None: `Request.finish_reason`, else `{type: length, length: 0}`.
        pooled_hidden_states
            B entries, arrays or CPU tensors or None.

        Raises InputError, and changes nothing, for a bad argument and while a step is in flight; otherwise as
        `send` and `stream_output`.
        """
        if self.sender is None or self._rows is None:
            return NOTHING_SENT
        batch = EmbeddingBatch(
            handles,
            embeddings,
            finished,
            reasons,
            pooled_hidden_states,
            slots=self.packer.slots,
            gather=self.gather,
            room=self.room,
        )
        self._check_nothing_in_flight("stream_embeddings")
        unguarded = self.packer.config.policy.send_empty
        if unguarded:
            batch.begin_again(self.packer, self._openings, self._final)
        ticket = self.packer.pack(batch.handles, control=batch.control)
        ticket.reasons.update(batch.reasons)
        try:
            report = self._send(ticket, unguarded, batch.carried)
        finally:
            batch.release()
        self._count_call()
        return report

    def _check_nothing_in_flight(self, call: str) -> None:
        if self.sender is not None:
            self.sender.check_peer()
        if self.packer.in_flight:
            raise InputError(f"{call}: expected no step in flight, {len(self.packer.in_flight)} are; send them")

    def _count_call(self) -> None:
        self._calls += 1
        if 0 < self._crash_after <= self._calls:
            raise CrashRequestedError(f"test crash: expected {self._crash_after} calls at most, got call {self._calls}")

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
        return self._send(ticket, idle)

    def _send(self, ticket: Ticket, idle: bool, carry: Carry | None = None) -> SendReport:
        if self.sender is None or self._rows is None:
            raise InputError("sender: expected one to send steps, got None: this rank does not own the socket")
        self.sender.check_peer()
        packed = ticket.wait()
        steps = [packed]
        try:
            if packed.header(L.H_CONVEYED):
                with self.packer.span("gate"):
                    steps += self._judged.decide(packed, ticket, self.judge)
            self.metrics.count_step(steps[-1], packed)
            self.metrics.dropped_rows = self.packer.dropped_rows
            with self.packer.span("send"):
                return self._rows.send(steps[-1], ticket, packed.header(L.H_LAUNCH), idle, carry)
        except SendError:
            raise
        except BaseException:
            self.packer.close()
            raise
        finally:
            for step in steps:
                step.release()
