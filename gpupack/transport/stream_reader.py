"""StreamReader: decoded frames of many streams, each continued without a hole or refused; no socket."""

from __future__ import annotations

from collections import deque

from gpupack.core.errors import ConfigError, FrameGapError, FrameValueError, StreamBrokenError, UnknownHandleError
from gpupack.transport.received import ReceivedStep
from gpupack.transport.stream_table import StreamTable
from gpupack.wire.frame import Frame, KnownRows

MAX_RANKS = 4096  # tables that hostile frames can make; no deployment has as many ranks
REMEMBERED_STREAMS = 4096  # ids of streams that were ended or never began properly


class StreamReader:
    """The streams of any number of senders, one a data-parallel rank; one thread at a time.

    Parameters
    ----------
    max_slots
        Slots of all ranks together; frames that need more are refused, so that hostile ones cannot
        make tables grow.
    """

    def __init__(self, *, max_slots: int = 1 << 20) -> None:
        if max_slots < 1:
            raise ConfigError(f"max_slots: expected at least 1, got {max_slots}")
        self.max_slots = max_slots
        self._tables: dict[int, StreamTable] = {}  # by dp rank
        self._ended: deque[int] = deque(maxlen=REMEMBERED_STREAMS)

    def take(self, frame: Frame) -> ReceivedStep:
        """Continue a stream by a decoded frame. Does not block.

        Raises a subclass of WireError for a frame that is refused. It changes nothing, but that after
        FrameGapError and UnknownHandleError the stream is given up: its later frames raise
        StreamBrokenError, until the sender reopens.
        """
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

    def clear(self) -> None:
        """Forget all streams."""
        self._tables.clear()
