"""The receiver's side of the two output paths, from the bytes of a message on; no socket is in between.

The time of freeing what was decoded is in neither. `no_socket` is what the scheduler's side took to
make the message: its time without the hand-over to zmq, which varies with how busy the machine is.
"""

from __future__ import annotations

from time import perf_counter_ns

from baselines import BatchMessage
from scheduler_paths import LoopPath, PackedPath
from workload import Case, Sampled, Sent

from gpupack.transport.receiver import OutputReceiver
from gpupack.wire.codec import decode
from gpupack.wire.frame import DEFAULT_MAX_FRAME_BYTES, stamp

RowContent = tuple[str, list[int], list[float], int]


class FrameTap:
    """In place of a sender: stamps the frames as one does, and keeps the last."""

    def __init__(self) -> None:
        self.data = b""
        self.dp_rank, self.max_frame_bytes = 0, DEFAULT_MAX_FRAME_BYTES
        self._next_frame_no = 0

    def check_peer(self) -> None:
        """There is none."""

    def send(self, frame: memoryview, *, peer_checked: bool = False) -> None:
        """Keep a copy."""
        stamp(frame, 1, self._next_frame_no)
        self._next_frame_no += 1
        self.data = bytes(frame)


class DataTap:
    """In place of a socket: keeps the last message."""

    def __init__(self) -> None:
        self.data = b""

    def send(self, data: bytes) -> None:
        """Keep it."""
        self.data = data


class PackedReceivePath:
    """gpupack's receiver side; `views` and `deltas` both count from the bytes of a frame."""

    stages = ("no_socket", "views", "deltas")

    def __init__(self, case: Case, sampled: Sampled) -> None:
        self.tap = FrameTap()
        self.source = PackedPath(case, sampled, self.tap)
        self.receiver = OutputReceiver("inproc://bench-step")  # its socket is not used: see `take`
        self.content: list[RowContent] = []
        self.keep_content = False

    def step(self) -> Sent:
        """Make a frame; time decode, checks and tables, then the deltas."""
        stages, rows, size = self.source.step()
        self.content = []
        if not size:
            return Sent((sum(stages), 0, 0), 0, 0)
        data = self.tap.data
        start = perf_counter_ns()
        received = self.receiver.take(decode(data))
        viewed = perf_counter_ns()
        deltas = received.deltas()
        done = perf_counter_ns()
        if self.keep_content:
            self.content = [(d.rid, d.token_ids, d.logprobs or [], d.completion_tokens) for d in deltas]
        return Sent((sum(stages), viewed - start, done - start), rows, size)


class LoopReceivePath:
    """The loop's receiver side: unpickle."""

    stages = ("no_socket", "decode")

    def __init__(self, case: Case, sampled: Sampled) -> None:
        self.tap = DataTap()
        self.source = LoopPath(case, sampled, self.tap)
        self.content: list[RowContent] = []
        self.keep_content = False

    def step(self) -> Sent:
        """Make a message; time its decoding."""
        stages, rows, size = self.source.step()
        self.content = []
        if not size:
            return Sent((sum(stages), 0), 0, 0)
        start = perf_counter_ns()
        message = self.source.streamer.decode(self.tap.data)
        done = perf_counter_ns()
        if self.keep_content:
            self.content = _content(message)
        return Sent((sum(stages), done - start), rows, size)


def _content(message: BatchMessage) -> list[RowContent]:
    scores = message.output_token_logprobs_val or [[]] * len(message.rids)
    ids = [list(delta) for delta in message.output_ids]
    return list(zip(message.rids, ids, scores, message.completion_tokens, strict=True))
