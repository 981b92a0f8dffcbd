"""The real SGLang's two sides: its streamer over real `Req`s, its sockets, its `sock_send` and `sock_recv`.

Which version and which wire is the environment's: SGLANG_USE_PICKLE_IPC=0 is msgpack. The clock does not
include what the scheduler does before it streams: appending tokens and logprobs to the requests' lists.
"""

from __future__ import annotations

import sys
from array import array
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import zmq
from workload import EOS_TOKEN_ID, PROMPT, RowContent, Sent, Step, Workload

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "sglang"))
from real import NEWER, RealStreamer, Setting, io_struct, runtime_context, sender
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.network import get_zmq_socket

VERSION_OF = "sglang"
MANY = 1 << 30


class CountingSocket(zmq.Socket[Any]):
    """A zmq socket that notes the size of what it sends."""

    sizes: list[int] = []  # noqa: RUF012 (all sockets of a process share it: there is one that sends)

    def send(self, data: Any, *args: Any, **options: Any) -> Any:
        self.sizes.append(len(data))
        return super().send(data, *args, **options)


class CountingContext(zmq.Context[Any]):
    """Makes such sockets."""

    _socket_class = CountingSocket


class Outbox:
    """The package's own sender; notes when the streamer calls it, and with how many rows."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._sender = sender(socket)
        self.called_ns = self.rows = 0

    def send_output(self, message: Any) -> None:
        """What the streamer calls once its loop has run."""
        self.called_ns, self.rows = perf_counter_ns(), len(message.rids)
        self._sender.send_output(message)


class SchedulerPath:
    """The streamer, with real requests."""

    stages = ("loop", "encode, send")

    def __init__(self, work: Workload, endpoint: str, step_bytes: float) -> None:
        self.work = work
        self.context = CountingContext(2)
        self.socket = get_zmq_socket(self.context, zmq.PUSH, endpoint, False)
        self.outbox = Outbox(self.socket)
        self.streamer = RealStreamer(Setting(), outbox=self.outbox).streamer  # type: ignore[arg-type]
        self.reqs: list[Any] = [None] * work.batch
        self.batch: list[Any] = []
        self._overrides = ExitStack()
        if NEWER:
            ranks = {"dp_rank": 0, "attn_tp_rank": 0, "tp_rank": 0, "attn_tp_size": 1, "tp_size": 1, "moe_tp_size": 1}
            self._overrides.enter_context(runtime_context.get_parallel().override(**ranks))

    def prepare(self, step: Step) -> None:
        """What the package's batch result processor leaves."""
        work = self.work
        for place, rid in step.new:
            self.reqs[place] = self._request(rid)
        self.batch = self.reqs[: step.rows]
        tokens = step.tokens.tolist()
        for req, accepted in zip(self.batch, tokens, strict=True):
            req.output_ids.extend(accepted)
        if work.returns_logprobs and step.logprobs is not None:
            for req, accepted, values in zip(self.batch, tokens, step.logprobs.tolist(), strict=True):
                req.logprob.output_token_logprobs_val.extend(values)
                req.logprob.output_token_logprobs_idx.extend(accepted)
        if work.top and step.top_val is not None and step.top_idx is not None:
            for req, values, ids in zip(self.batch, step.top_val.tolist(), step.top_idx.tolist(), strict=True):
                req.logprob.output_top_logprobs_val.extend(values)
                req.logprob.output_top_logprobs_idx.extend(ids)
        for place in step.ending.tolist():
            req = self.reqs[place]
            req.finished_reason = (
                FINISH_LENGTH(work.output_len) if step.at_length else FINISH_MATCHED_TOKEN(EOS_TOKEN_ID)
            )
            req.finished_len = len(req.output_ids)

    def run(self, step: Step) -> Sent:
        """One step."""
        outbox, sizes = self.outbox, CountingSocket.sizes
        outbox.called_ns = 0
        sizes.clear()
        start = perf_counter_ns()
        self.streamer.stream_output(self.batch, self.work.returns_logprobs)
        end = perf_counter_ns()
        if not sizes:
            return Sent((end - start, 0), 0, 0)
        return Sent((outbox.called_ns - start, end - outbox.called_ns), outbox.rows, sizes[0])

    def _request(self, rid: str) -> Any:
        work = self.work
        params = SamplingParams(max_new_tokens=work.output_len or MANY, stream_interval=work.interval)
        params.normalize(None)
        prompt = array("q", PROMPT)
        return Req(
            rid,
            "",
            prompt,
            params,
            return_logprob=work.returns_logprobs,
            top_logprobs_num=work.top,
            stream=True,
            origin_input_ids_unpadded=prompt,
        )

    def state_bytes(self) -> int:
        """Not known: it is spread over the requests."""
        return 0

    def close(self) -> None:
        """End it."""
        self._overrides.close()
        self.socket.close(0)
        self.context.term()


class ReceiverPath:
    """The detokenizer's way to a message."""

    stages = ("deltas",)

    def __init__(self, work: Workload, endpoint: str) -> None:
        self.context = zmq.Context(2)
        self.socket = get_zmq_socket(self.context, zmq.PULL, endpoint, True)
        self.message: Any = None

    def receive(self) -> tuple[int, ...]:
        """Take a message that is there."""
        start = perf_counter_ns()
        self.message = io_struct.sock_recv(self.socket)
        return (perf_counter_ns() - start,)

    def content(self) -> list[RowContent]:
        """What the newest message says."""
        m = self.message
        nothing: list[Any] = [[]] * len(m.rids)
        reasons = [(reason or {}).get("type", "") for reason in m.finished_reasons]
        columns = (
            m.output_token_logprobs_val or nothing,
            m.output_top_logprobs_val or nothing,
            m.output_top_logprobs_idx or nothing,
        )
        ids = [list(delta) for delta in m.output_ids]
        return list(zip(m.rids, ids, *columns, reasons, strict=True))

    def forget(self) -> None:
        """Free the newest message."""
        self.message = None

    def close(self) -> None:
        """End it."""
        self.socket.close(0)
        self.context.term()
