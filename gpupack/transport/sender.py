"""OutputSender: frames to one receiver, never blocking while there is room, never losing one silently."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

import zmq

from gpupack.core.errors import BackpressureError, ClosedError, ConfigError, PeerLostError
from gpupack.transport.context import close_when_collected, context_of_batch_threads
from gpupack.transport.peer import PeerMonitor
from gpupack.transport.send_queue import PendingFrames
from gpupack.wire.codec import check_max_frame_bytes
from gpupack.wire.frame import DEFAULT_MAX_FRAME_BYTES, check_size, stamp

POLL_MS = 20  # while a send waits for room it looks for a lost peer this often
NOBLOCK = int(zmq.NOBLOCK)


class OutputSender:
    """Sends frames to the receiver that binds `endpoint`; one thread at a time.

    Parameters
    ----------
    endpoint
        What the receiver binds: `ipc://…` or `tcp://…`. The receiver may come later: frames wait.
    dp_rank
        Data-parallel rank, for messages; the frames carry their own.
    send_timeout_ms
        How long a send may block once more than `max_pending_bytes` wait.
    max_pending_bytes
        Bytes of merged frames that may wait here before a send blocks.
    high_water_mark
        Frames that zmq queues; beyond these, frames wait here and are merged.
    max_frame_bytes
        No frame passes this size, merged ones included; the receiver must take as much.
    context
        zmq context; one of its own unless given.

    Attributes
    ----------
    frames_sent, bytes_sent
        Handed to zmq.
    frames_merged
        Frames that went out inside an earlier one.
    blocked_ns
        Nanoseconds for which sends have blocked.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        dp_rank: int = 0,
        send_timeout_ms: int = 1000,
        max_pending_bytes: int = 64 << 20,
        high_water_mark: int = 64,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        for name, value, low in (
            ("send_timeout_ms", send_timeout_ms, 0),
            ("max_pending_bytes", max_pending_bytes, 0),
            ("high_water_mark", high_water_mark, 1),  # 0 is no limit to zmq
        ):
            if value < low:
                raise ConfigError(f"{name}: expected at least {low}, got {value}")
        self.endpoint = endpoint
        self.dp_rank = dp_rank
        self.send_timeout_ms = send_timeout_ms
        self.max_pending_bytes = max_pending_bytes
        self.high_water_mark = high_water_mark
        self.max_frame_bytes = check_max_frame_bytes(max_frame_bytes)
        self.frames_sent = self.bytes_sent = self.blocked_ns = 0
        self._pending = PendingFrames(self.max_frame_bytes)
        self._lost: str | None = None
        self._closed = False
        self._socket: zmq.Socket[bytes] | None = None
        self._own_context = context is None
        self._context = context_of_batch_threads() if context is None else context
        self._closers: list[Callable[[], object]] = []  # of the open socket, for `close_when_collected`
        close_when_collected(self, self._closers, self._context if self._own_context else None)
        try:
            self._open()
        except zmq.ZMQError:
            self.close(0)
            raise

    @property
    def stream_id(self) -> int:
        """Random id of the current stream."""
        return self._stream_id

    @property
    def next_frame_no(self) -> int:
        """Number of the next frame to be handed to zmq: so many were handed over on this stream."""
        return self._next_frame_no

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait here because zmq takes no more."""
        return self._pending.bytes

    @property
    def frames_merged(self) -> int:
        """Frames that were merged into an earlier one while they waited."""
        return self._pending.frames_merged

    def __enter__(self) -> OutputSender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- sending ----------------------------------------------------------------------------------

    def send(self, frame: memoryview | bytearray, *, peer_checked: bool = False) -> None:
        """Hand a frame to zmq, after those that wait; it is copied, the buffer is free on return.

        `peer_checked` says that `check_peer()` has just been called, and is not called again.

        Does not block, unless more than `max_pending_bytes` wait: then up to `send_timeout_ms`.

        Raises
        ------
        PeerLostError
            The receiver has gone; this frame was not taken. `reopen()` starts a new stream.
        BackpressureError
            The time-out passed. Everything is kept, this frame included: it must not be sent again.
        FrameTooLargeError
            The frame is over `max_frame_bytes`; it was not taken.
        """
        if not peer_checked:
            self.check_peer()
        check_size(len(frame), self.max_frame_bytes)
        if not self._pending and self._hand_over(frame):
            return
        self._pending.add(frame)
        if not self._send_pending() and self._pending.bytes > self.max_pending_bytes:
            self._wait_for_room()

    def check_peer(self) -> None:
        """Raise PeerLostError if the receiver has gone, ClosedError after `close()`. Does not block."""
        if self._socket is not None and not self._peer.lost():
            return
        if self._closed:
            raise ClosedError("sender: it was closed")
        if self._lost is None:
            handed = f"frames 0 to {self._next_frame_no - 1}" if self._next_frame_no else "no frames"
            self._lost = (
                f"receiver at {self.endpoint} went away; {handed} of stream {self._stream_id:#x} (dp rank "
                f"{self.dp_rank}) were handed to it and the last of them may be lost; reopen() starts a new stream"
            )
            # Now, not at reopen(): zmq would hand what it still holds to the next receiver that comes.
            self._close_socket(0)
        raise PeerLostError(self._lost)

    def flush(self, timeout_ms: int = 0) -> bool:
        """Send what waits here, blocking up to `timeout_ms`; true if all was handed to zmq.

        Raises PeerLostError if the receiver has gone.
        """
        deadline = time.monotonic_ns() + timeout_ms * 1_000_000
        self.check_peer()
        while not self._send_pending():
            if not self._poll(deadline):
                return False
        return True

    # --- life -------------------------------------------------------------------------------------

    def reopen(self, endpoint: str | None = None) -> None:
        """Drop the connection and all that waits, and start a new stream at frame 0, here or elsewhere.

        Its frames must begin with opening records; `OutputStreamer.reopen()` sees to that. Does not
        block.
        """
        if self._closed:
            raise ClosedError("sender: it was closed")
        self._close_socket(0)
        self._pending.clear()
        self.endpoint = endpoint or self.endpoint
        self._lost = None
        self._open()

    def close(self, linger_ms: int = 1000) -> None:
        """Send what waits, then close; blocks up to `linger_ms`, after which the rest is dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic_ns() + linger_ms * 1_000_000
        try:
            while self._socket is not None and not self._peer.lost() and not self._send_pending():
                if not self._poll(deadline):
                    break
        finally:
            self._close_socket(max(0, (deadline - time.monotonic_ns()) // 1_000_000))
            if self._own_context:
                self._context.term()

    def _open(self) -> None:
        self._stream_id = int.from_bytes(os.urandom(8), "little") or 1
        self._next_frame_no = 0
        socket = self._context.socket(zmq.PUSH)
        self._socket = socket
        # A sender that was never closed must not hold up its process; `close` sets its own time.
        socket.linger = 0
        self._peer = PeerMonitor(socket)
        self._closers += [self._peer.close, partial(socket.close, 0)]
        socket.sndhwm = self.high_water_mark
        # A machine that is gone sends no goodbye; a receiver that is only stopped still answers these.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = 10
        socket.tcp_keepalive_intvl = 5
        socket.tcp_keepalive_cnt = 3
        socket.connect(self.endpoint)

    def _close_socket(self, linger_ms: int) -> None:
        if self._socket is not None:
            self._closers.clear()
            self._peer.close()
            self._socket.close(linger_ms)
            self._socket = None

    def _hand_over(self, frame: memoryview | bytearray) -> bool:
        assert self._socket is not None
        stamp(frame, self._stream_id, self._next_frame_no)
        try:
            self._socket.send(frame, NOBLOCK)
        except zmq.Again:
            return False
        self._next_frame_no += 1
        self.frames_sent += 1
        self.bytes_sent += len(frame)
        return True

    def _send_pending(self) -> bool:
        """Hand over what waits, in order, until zmq takes no more; true if nothing is left."""
        while self._pending:
            if not self._hand_over(self._pending.peek()):
                return False
            self._pending.pop()
        return True

    def _wait_for_room(self) -> None:
        self._pending.compact()
        if self._pending.bytes <= self.max_pending_bytes:
            return
        start = time.monotonic_ns()
        try:
            while not self._send_pending() and self._pending.bytes > self.max_pending_bytes:
                if not self._poll(start + self.send_timeout_ms * 1_000_000):
                    raise BackpressureError(
                        f"receiver at {self.endpoint}: expected at most {self.max_pending_bytes} bytes to wait, "
                        f"{self._pending.bytes} wait after {self.send_timeout_ms} ms; all are kept, the frame of "
                        "this call included"
                    )
                self.check_peer()
        finally:
            self.blocked_ns += time.monotonic_ns() - start

    def _poll(self, deadline_ns: int) -> bool:
        """Wait a little for room in zmq; false once the deadline has passed."""
        assert self._socket is not None
        left_ms = (deadline_ns - time.monotonic_ns()) // 1_000_000
        if left_ms <= 0:
            return False
        self._socket.poll(min(left_ms, POLL_MS), zmq.POLLOUT)
        return True
