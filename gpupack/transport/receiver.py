"""OutputReceiver: frames of many senders, verified and continued without a hole, or refused."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import TracebackType

import zmq

from gpupack.core.errors import ClosedError, ConfigError
from gpupack.transport.context import close_when_collected
from gpupack.transport.received import Delta, ReceivedStep
from gpupack.transport.stream_reader import StreamReader
from gpupack.wire.codec import check_max_frame_bytes, decode
from gpupack.wire.frame import DEFAULT_MAX_FRAME_BYTES

__all__ = ["Delta", "OutputReceiver", "ReceivedStep"]

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
        if high_water_mark < 1:
            raise ConfigError(f"high_water_mark: expected at least 1, got {high_water_mark}")
        self.max_frame_bytes = check_max_frame_bytes(max_frame_bytes)
        self._reader = StreamReader(max_slots=max_slots)
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
        return self._reader.take(
            decode(message.buffer, max_frame_bytes=self.max_frame_bytes, known=self._reader.known_rows)
        )

    def lost(self, dp_rank: int = 0) -> list[str]:
        """Rids of a rank that this receiver cannot continue without a hole; see StreamReader.lost."""
        return self._reader.lost(dp_rank)

    def close(self) -> None:
        """Close the socket, with what was not yet received; removes the file of an ipc endpoint. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._reader.clear()
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
