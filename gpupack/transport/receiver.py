"""OutputReceiver: frames of many senders, verified and continued without a hole, or refused."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from pathlib import Path
from types import TracebackType

import zmq

from gpupack.errors import (
    ClosedError,
    ConfigError,
    FrameGapError,
    FrameValueError,
    StreamBrokenError,
    UnknownHandleError,
)
from gpupack.transport.context import close_when_collected
from gpupack.transport.received import Delta, ReceivedStep
from gpupack.transport.stream_table import StreamTable
from gpupack.wire.codec import check_max_frame_bytes, decode
from gpupack.wire.frame import DEFAULT_MAX_FRAME_BYTES, Frame, KnownRows

__all__ = ["Delta", "OutputReceiver", "ReceivedStep"]

MAX_RANKS = 4096  # tables that hostile frames can make; no deployment has as many ranks
REMEMBERED_STREAMS = 4096  # ids of streams that were ended or never began properly
IPC = "ipc://"
NOBLOCK = int(zmq.NOBLOCK)


class OutputReceiver:
    """Receives the frames of any number of senders; one thread at a time.

    Parameters
    ----------
    endpoint
        What to bind: `ipc://…`, or `tcp://host:port` with `*` for a free port.
    max_frame_bytes
        zmq drops the connection of a sender whose message is larger; at least the senders' own value.
    max_slots
        Slots of all ranks together; frames that need more are refused, so that hostile ones cannot
        make tables grow.
    high_water_mark
        Frames that zmq queues per sender.
    context
        zmq context; one of its own unless given.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        max_slots: int = 1 << 20,
        high_water_mark: int = 64,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        for name, value in (("max_slots", max_slots), ("high_water_mark", high_water_mark)):
            if value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")
        self.max_frame_bytes = check_max_frame_bytes(max_frame_bytes)
        self.max_slots = max_slots
        self._tables: dict[int, StreamTable] = {}  # by dp rank
        self._ended: deque[int] = deque(maxlen=REMEMBERED_STREAMS)
        self._closed = False
        self._endpoint = ""
        self._ipc_inode: int | None = None
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        close_when_collected(self, [partial(self._socket.close, 0)], self._context if self._own_context else None)
        try:
            self._socket.linger = 0
            self._socket.rcvhwm = high_water_mark
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
            self._socket.bind(endpoint)
            self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self._ipc_inode = _ipc_inode(self._endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """The endpoint that was bound, with the port that was chosen."""
        return self._endpoint

    def __enter__(self) -> OutputReceiver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def recv(self, timeout_ms: int) -> ReceivedStep | None:
        """The next frame, or None if none came within `timeout_ms`, for which it blocks.

        Raises a subclass of WireError for a frame that is refused. It changes nothing, but that after
        FrameGapError and UnknownHandleError the stream is given up: its later frames raise
        StreamBrokenError, until the sender reopens. The next `recv` goes on with the next frame.
        """
        if self._closed:
            raise ClosedError("receiver: it was closed")
        deadline = time.monotonic_ns() + timeout_ms * 1_000_000
        while True:
            try:
                message = self._socket.recv(NOBLOCK, copy=False)
                break
            except zmq.Again:
                left_ms = (deadline - time.monotonic_ns()) // 1_000_000
                if left_ms <= 0 or not self._socket.poll(left_ms):
                    return None
        # The views of a frame hold the message's buffer, and that the message.
        return self.take(decode(message.buffer, max_frame_bytes=self.max_frame_bytes, known=self.known_rows))

    def take(self, frame: Frame) -> ReceivedStep:
        """Continue a stream by a decoded frame; what `recv` does after decoding. Does not block."""
        table = self._tables.get(frame.dp_rank)
        if table is None or table.stream_id != frame.stream_id:
            return self._begin(frame, table)
        table.requests.max_slots = self._slots_left(table)
        try:
            changes = table.check(frame)
        except (FrameGapError, UnknownHandleError):
            table.broken = True
            raise
        records, dropped, score_ids = table.apply(frame, changes)
        return ReceivedStep(frame, records, tuple(changes.incomplete), dropped, score_ids)

    def known_rows(self, dp_rank: int) -> KnownRows | None:
        """Rows of a rank's newest frame, if all of them are open still: mostly those of the next."""
        table = self._tables.get(dp_rank)
        return None if table is None else table.known

    def _begin(self, frame: Frame, old: StreamTable | None) -> ReceivedStep:
        """Start a stream; it ends the one that its rank had."""
        if frame.stream_id == 0:
            raise FrameValueError("stream_id: expected a random number, got 0")
        if frame.stream_id in self._ended:
            raise StreamBrokenError(f"stream {frame.stream_id:#x} of dp rank {frame.dp_rank} was given up or replaced")
        if old is None and len(self._tables) >= MAX_RANKS:
            raise FrameValueError(f"dp_rank: expected at most {MAX_RANKS} ranks, got another, {frame.dp_rank}")
        table = StreamTable(frame.stream_id, frame.dp_rank, self._slots_left(old), old)
        try:
            changes = table.check(frame)
        except (FrameGapError, UnknownHandleError):
            # A stream that never began: it must not end the one that its rank has.
            self._ended.append(frame.stream_id)
            raise
        if old is not None:
            self._ended.append(old.stream_id)
        self._tables[frame.dp_rank] = table
        records, dropped, score_ids = table.apply(frame, changes)
        return ReceivedStep(frame, records, tuple(table.requests.lost), dropped, score_ids)

    def _slots_left(self, table: StreamTable | None) -> int:
        """Slots that a table may have: what the tables of other ranks leave."""
        if len(self._tables) <= 1 and table is not None:
            return self.max_slots
        return self.max_slots - sum(len(other.requests) for other in self._tables.values() if other is not table)

    def lost(self, dp_rank: int = 0) -> list[str]:
        """Rids of a rank that this receiver cannot continue without a hole, so far as it knows.

        When a new stream replaces an old one, every request of the old one without a final row is listed
        (`ReceivedStep.lost` of the new stream's first frame says which), until the new stream opens it again at
        the token where this receiver stands, its output dropped as often as this receiver knows. A request
        that resumes elsewhere stays, or comes, on the list, and its rows go on behind the hole, until it
        ends or restarts.
        """
        table = self._tables.get(dp_rank)
        return list(table.requests.lost) if table is not None else []

    def close(self) -> None:
        """Close the socket, with what was not yet received; removes the file of an ipc endpoint. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._tables.clear()
        self._socket.close(0)
        if self._own_context:
            self._context.term()
        # zmq leaves the file; a receiver that has bound the same path since has made another one.
        if self._ipc_inode is not None and _ipc_inode(self._endpoint) == self._ipc_inode:
            Path(self._endpoint.removeprefix(IPC)).unlink(missing_ok=True)


def _ipc_inode(endpoint: str) -> int | None:
    """Inode of the file of an ipc endpoint; None if there is none."""
    path = Path(endpoint.removeprefix(IPC))
    return path.stat().st_ino if endpoint.startswith(IPC) and path.exists() else None
