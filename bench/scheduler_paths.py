"""The scheduler's side of the two output paths: gpupack, and the per-request loop with pickle.

What was sampled is on the host already, for both, as numpy arrays and as Python lists.
"""

from __future__ import annotations

from array import array
from time import perf_counter_ns
from typing import Any, Protocol

from baseline_request import BaselineRequest
from baselines import PerRequestStreamer
from workload import EOS_TOKEN_ID, PROMPT, VOCAB_SIZE, Case, Sampled, Sent

from gpupack.config import PackerConfig
from gpupack.packer import Packer
from gpupack.request import Request
from gpupack.streamer import OutputStreamer


class FrameSender(Protocol):
    """What the streamer needs of an OutputSender."""

    dp_rank: int
    max_frame_bytes: int

    def send(self, frame: memoryview, *, peer_checked: bool = False) -> None: ...
    def check_peer(self) -> None: ...


class DataSender(Protocol):
    """What the loop needs of a socket."""

    def send(self, data: bytes) -> Any: ...


class PackedPath:
    """gpupack's scheduler side: `Packer.step`, then `OutputStreamer.send`."""

    stages = ("pack", "send")

    def __init__(self, case: Case, sampled: Sampled, sender: FrameSender) -> None:
        self.case, self.sampled = case, sampled
        config = PackerConfig(
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS_TOKEN_ID,),
            capacity=case.batch,
            stream_interval=case.interval,
            logprobs=case.logprobs,
        )
        self.packer = Packer(config)
        self.streamer = OutputStreamer(self.packer, sender)  # type: ignore[arg-type]
        requests = [Request(rid, PROMPT, return_logprob=case.logprobs) for rid in case.rids()]
        self.handles = self.streamer.admit(requests)
        self.steps = 0

    def step(self) -> Sent:
        """Time one step."""
        case = self.case
        handles = self.handles[: case.joined(self.steps)]
        tokens, scores = self.sampled.at(self.steps, len(handles))
        logprobs = scores if case.logprobs else None
        self.steps += 1
        start = perf_counter_ns()
        ticket = self.packer.step(handles, tokens, logprobs=logprobs, return_logprob=case.logprobs)
        packed = perf_counter_ns()
        report = self.streamer.send(ticket)
        sent = perf_counter_ns()
        return Sent((packed - start, sent - packed), report.rows, report.frame_bytes)


class LoopPath:
    """The per-request loop, pickle, and a send; tokens are appended to the requests' lists before the clock starts."""

    stages = ("loop", "encode", "send")

    def __init__(self, case: Case, sampled: Sampled, sender: DataSender) -> None:
        self.case, self.sampled, self.sender = case, sampled, sender
        self.streamer = PerRequestStreamer(case.interval)
        self.requests = [BaselineRequest(rid, array("q", PROMPT), return_logprob=case.logprobs) for rid in case.rids()]
        self.steps = 0

    def step(self) -> Sent:
        """Time one step."""
        requests = self.requests[: self.case.joined(self.steps)]
        self._commit(requests)
        self.steps += 1
        start = perf_counter_ns()
        message = self.streamer.message(requests, self.case.logprobs)
        looped = encoded = sent = perf_counter_ns()
        if message is None:
            return Sent((looped - start, 0, 0), 0, 0)
        data = self.streamer.encode(message)
        encoded = perf_counter_ns()
        self.sender.send(data)
        sent = perf_counter_ns()
        return Sent((looped - start, encoded - looped, sent - encoded), len(message.rids), len(data))

    def _commit(self, requests: list[BaselineRequest]) -> None:
        tokens, scores = self.sampled.at(self.steps, len(requests))
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.output_ids.append(token)
        if self.case.logprobs:
            for request, token, score in zip(requests, tokens.tolist(), scores.tolist(), strict=True):
                request.logprobs.token_val.append(score)
                request.logprobs.token_idx.append(token)
