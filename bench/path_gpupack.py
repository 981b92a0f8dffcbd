"""gpupack's two sides: `Packer.step` and `OutputStreamer.send`; a receiver's frame, views and deltas.

The clock includes what the original does not have: making the `Request`s of newcomers, admitting them,
and retiring those that sent their final row.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import numpy as np
import zmq
from workload import EOS_TOKEN_ID, PROMPT, VOCAB_SIZE, RowContent, Sent, Step, Workload

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.request import NO_LIMIT, Request
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.streamer.output_streamer import OutputStreamer
from gpupack.transport.sender import OutputSender
from gpupack.transport.stream_reader import StreamReader
from gpupack.wire.codec import decode

VERSION_OF = "gpupack"


class SchedulerPath:
    """The CPU backend on the scheduler's side."""

    stages = ("pack", "send")

    def __init__(self, work: Workload, endpoint: str, step_bytes: float) -> None:
        self.work = work
        self.config = PackerConfig(
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS_TOKEN_ID,),
            capacity=work.batch,
            max_accept=work.accept,
            stream_interval=work.interval,
            logprobs=work.returns_logprobs,
            max_top_logprobs=work.top,
        )
        self.sender = OutputSender(endpoint)
        self.streamer = OutputStreamer(Packer(self.config), self.sender)
        self.handles = np.zeros(work.batch, np.int64)
        self.inputs: dict[str, Any] = {}
        self.control: Control | None = None

    def prepare(self, step: Step) -> None:
        """What the sampler gave, as the packer takes it; what the engine found out about its own requests."""
        work = self.work
        self.inputs = {"token_ids": step.tokens if work.accept > 1 else step.tokens[:, 0]}
        if work.accept > 1:
            self.inputs["accept_lens"] = np.full(step.rows, work.accept, np.int32)
        if work.returns_logprobs:
            self.inputs["logprobs"] = step.logprobs
        if work.top:
            self.inputs |= {"top_logprobs_val": step.top_val, "top_logprobs_idx": step.top_idx}
        self.control = None
        ours = [place for place in step.ending.tolist() if work.engine_judged(place)]
        if ours:
            self.control = Control(step.rows).reset(step.rows)
            code = L.FINISH_LENGTH if step.at_length else L.FINISH_STOP_TOKEN
            for place in ours:
                self.control.finish(place, code, match=work.output_len or EOS_TOKEN_ID)

    def run(self, step: Step) -> Sent:
        """One step."""
        start = perf_counter_ns()
        if step.new:
            self._admit(step)
        handles = self.handles[: step.rows]
        returns = self.work.returns_logprobs
        ticket = self.streamer.packer.step(handles, **self.inputs, control=self.control, return_logprob=returns)
        packed = perf_counter_ns()
        report = self.streamer.send(ticket)
        if len(report.finished):
            self.streamer.retire(report.finished)
        return Sent((packed - start, perf_counter_ns() - packed), report.rows, report.frame_bytes)

    def _admit(self, step: Step) -> None:
        work = self.work
        requests = [
            Request(
                rid,
                PROMPT,
                max_new_tokens=work.output_len or NO_LIMIT,
                judge="engine" if work.engine_judged(place) else None,
                return_logprob=work.returns_logprobs,
                top_logprobs_num=work.top,
            )
            for place, rid in step.new
        ]
        self.handles[[place for place, _ in step.new]] = self.streamer.admit(requests)

    def state_bytes(self) -> int:
        """Bytes of state, rings and packed steps."""
        return self.config.state_bytes + self.config.buffer_bytes

    def close(self) -> None:
        """End it."""
        if self.sender.frames_merged:
            raise AssertionError(f"expected a receiver that keeps up, {self.sender.frames_merged} frames waited")
        self.streamer.close()


class ReceiverPath:
    """What `OutputReceiver.recv` does with a frame, on a socket that can be waited for outside of the clock."""

    stages = ("views", "deltas")

    def __init__(self, work: Workload, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.bind(endpoint)
        self.reader = StreamReader()
        self.deltas: list[Any] = []

    def receive(self) -> tuple[int, ...]:
        """Take a message that is there: a frame that passed all checks, then the deltas; ns from the start."""
        start = perf_counter_ns()
        step = self.reader.take(decode(self.socket.recv(copy=False).buffer, known=self.reader.known_rows))
        viewed = perf_counter_ns()
        self.deltas = step.deltas()
        return viewed - start, perf_counter_ns() - start

    def content(self) -> list[RowContent]:
        """What the newest message says."""
        return [
            (
                d.rid,
                d.token_ids,
                d.logprobs or [],
                d.top_logprobs_val or [],
                d.top_logprobs_idx or [],
                (d.finish_reason or {}).get("type", ""),
            )
            for d in self.deltas
        ]

    def forget(self) -> None:
        """Free the newest message."""
        self.deltas = []

    def close(self) -> None:
        """End it."""
        self.socket.close(0)
        self.context.term()
