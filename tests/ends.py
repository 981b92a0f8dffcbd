"""What the transport tests send."""

from __future__ import annotations

import time

import numpy as np
from frames import Row, Step, frame_of

from gpupack.core import layout as L
from gpupack.core.errors import PeerLostError
from gpupack.transport.sender import OutputSender
from gpupack.wire.codec import encode_frame
from gpupack.wire.metadata import OpeningRecord, SideRecord

WAIT_S = 20.0
WAIT_MS = 10_000


class Feed:
    """Frames of `rows` requests that get one token a step: token `step` at step `step`."""

    def __init__(self, rows: int = 4, name: str = "r", pad: str = "") -> None:
        self.rids = [f"{name}{i}" for i in range(rows)]
        self.steps = 0
        self.pad = pad
        self._columns = frame_of(Step([Row(i, 1) for i in range(rows)]))._replace(
            token_indptr=np.arange(rows + 1, dtype=np.int32)
        )

    def next(self, *, final: bool = False, resumed: bool = False) -> bytearray:
        """The frame of the next step; the first one opens, a resumed one opens again."""
        opens = self.steps == 0 or resumed
        flags = L.ROW_OPENING * opens | (L.ROW_FINAL | L.FINISH_LENGTH << L.ROW_CODE_SHIFT) * final
        openings = [
            OpeningRecord(row=i, rid=rid, decoded_text=self.pad, tokens_before=self.steps, resumed=resumed)
            for i, rid in enumerate(self.rids)
        ]
        rows = len(self.rids)
        frame = self._columns._replace(
            step=self.steps,
            flags=np.full(rows, flags, np.int32),
            visible_len=np.full(rows, self.steps + 1, np.int32),
            match=np.full(rows, self.steps + 1, np.int32) if final else None,
            token_ids=np.full(rows, self.steps, np.int32),
            side=SideRecord(openings=openings) if opens else None,
        )
        self.steps += 1
        return encode_frame(frame)


def wait_for_peer(sender: OutputSender) -> None:
    """Wait until the handshake is done."""
    deadline = time.monotonic() + WAIT_S
    while not sender._peer.connected:
        sender.check_peer()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def send_until_lost(sender: OutputSender, feed: Feed, within_s: float) -> PeerLostError:
    """Send on as a scheduler would; the error, which must come in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            sender.send(feed.next())
        except PeerLostError as error:
            return error
        time.sleep(0.005)
    raise AssertionError(f"no PeerLostError within {within_s} s")
