"""The floor on the host: the bytes of gpupack's frame, copied once and handed to zmq; nothing is decided.

Only for batches in which all requests send one token, in the order of their names.
"""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np
import zmq
from workload import RowContent, Sent, Step, Workload

VERSION_OF = "pyzmq"
WORD = 4


class SchedulerPath:
    """int32 columns: one copy of as many as a frame of gpupack has, the newest tokens among them, and a send."""

    stages = ("copy", "send")

    def __init__(self, work: Workload, endpoint: str, step_bytes: float) -> None:
        if work.interval > 1 or work.accept > 1 or work.finishing or work.output_len:
            raise ValueError(f"workload: expected one in which all send one token in each step, got {work}")
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.connect(endpoint)
        self.columns = np.zeros((max(round(step_bytes / (WORD * work.batch)), 2 + 2 * work.top), work.batch), np.int32)
        self.frame = np.empty_like(self.columns)

    def prepare(self, step: Step) -> None:
        """The tokens, and what goes with them, as columns."""
        parts = [step.tokens]
        if step.logprobs is not None:
            parts.append(step.logprobs.view(np.int32))
        if step.top_val is not None and step.top_idx is not None:
            parts += [step.top_val[:, 0].view(np.int32), step.top_idx[:, 0]]
        at = 0
        for part in parts:
            self.columns[at : at + part.shape[1]] = part.T
            at += part.shape[1]

    def run(self, step: Step) -> Sent:
        """One step."""
        start = perf_counter_ns()
        np.copyto(self.frame, self.columns)
        copied = perf_counter_ns()
        self.socket.send(self.frame)
        return Sent((copied - start, perf_counter_ns() - copied), step.rows, self.frame.nbytes)

    def state_bytes(self) -> int:
        """None."""
        return 0

    def close(self) -> None:
        """End it."""
        self.socket.close(0)
        self.context.term()


class ReceiverPath:
    """A view of the columns, then the tokens as a list."""

    stages = ("views", "deltas")

    def __init__(self, work: Workload, endpoint: str) -> None:
        self.work = work
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.bind(endpoint)
        self.rids = [f"{i:032x}" for i in range(work.batch)]
        self.forget()

    def receive(self) -> tuple[int, ...]:
        """Take a message that is there."""
        start = perf_counter_ns()
        self.columns = np.frombuffer(self.socket.recv(copy=False).buffer, np.int32).reshape(-1, self.work.batch)
        viewed = perf_counter_ns()
        self.tokens = self.columns[0].tolist()
        return viewed - start, perf_counter_ns() - start

    def content(self) -> list[RowContent]:
        """What the newest message says."""
        top, rows = self.work.top, len(self.tokens)
        scores: list[list[float]] = [[]] * rows
        values: list[list[list[float]]] = [[]] * rows
        ids: list[list[list[int]]] = [[]] * rows
        if self.work.returns_logprobs:
            scores = [[value] for value in self.columns[1].view(np.float32).tolist()]
        if top:
            values = [[row] for row in self.columns[2 : 2 + top].T.copy().view(np.float32).tolist()]
            ids = [[row] for row in self.columns[2 + top : 2 + 2 * top].T.tolist()]
        tokens = [[token] for token in self.tokens]
        return list(zip(self.rids, tokens, scores, values, ids, [""] * rows, strict=True))

    def forget(self) -> None:
        """Free the newest message."""
        self.columns, self.tokens = np.empty((0, self.work.batch), np.int32), list[int]()

    def close(self) -> None:
        """End it."""
        self.socket.close(0)
        self.context.term()
