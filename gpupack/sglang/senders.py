"""Senders: how the rows of a step leave the scheduler, as the engine's message or as a frame."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang.frames import FrameMaker, UnsupportedByWire
from gpupack.sglang.message import MessageMaker
from gpupack.sglang.message_pickle import PickledMaker, read_back
from gpupack.sglang.output_rows import OutputRows
from gpupack.sglang.receiver import NativeReceiver
from gpupack.sglang.request_states import RequestStates
from gpupack.sglang.settings import Settings
from gpupack.sglang.stats import Stats
from gpupack.sglang.versions import EngineVersion
from gpupack.wire.frame import stamp

logger = logging.getLogger(__name__)


class StepSender(Protocol):
    """Makes what a step sends, then sends it; one thread."""

    def make(self, out: OutputRows) -> Any:
        """What is to be sent of the rows of a step."""

    def send(self, made: Any) -> None:
        """Send it; blocks as the engine's own sends do."""

    def shown(self, made: Any) -> Any:
        """The message that the engine's detokenizer gets of it, for a comparison."""

    def leave(self, slots: NDArray[np.int32]) -> None:
        """Rows of these slots, int32 `[n]`, go another way now."""


class MessageSender:
    """The compatible wire."""

    def __init__(self, streamer: Any, maker: MessageMaker, stats: Stats) -> None:
        self._streamer, self._maker, self._stats = streamer, maker, stats

    def make(self, out: OutputRows) -> Any:
        """A message; see StepSender."""
        return self._maker.make(out)

    def send(self, made: Any) -> None:
        """See StepSender."""
        if isinstance(made, bytes):
            self._send_bytes(made)
        else:
            self._streamer.send_to_detokenizer.send_output(made)
        self._stats.messages += 1

    def shown(self, made: Any) -> Any:
        """What a reader makes of it."""
        return read_back(made) if isinstance(made, bytes) else made

    def _send_bytes(self, data: bytes | bytearray) -> None:
        socket = getattr(self._streamer.send_to_detokenizer, "socket", None)
        if socket is not None:  # else a rank that does not own one
            socket.send(data)

    def leave(self, slots: NDArray[np.int32]) -> None:
        """Nothing: a message says all that it says."""


class FrameSender(MessageSender):
    """Frames on the engine's own socket, so that they and the messages between them keep the order of the steps.

    One stream for the life of the process; the socket's own limits hold. What a frame cannot carry goes as a
    message, counted by reason; the requests of such a batch open again with their next frame.
    """

    def __init__(
        self, streamer: Any, maker: MessageMaker, frames: FrameMaker, stats: Stats, settings: Settings
    ) -> None:
        super().__init__(streamer, maker, stats)
        self._frames = frames
        self._stream_id = int.from_bytes(os.urandom(8), "little") or 1
        self._frame_no = 0
        self._check = NativeReceiver() if settings.verify else None

    def make(self, out: OutputRows) -> Any:
        """A stamped frame, or a message; see StepSender."""
        try:
            frame = self._frames.make(out)
        except UnsupportedByWire as why:
            if self._stats.count_unframed(str(why)):
                logger.warning("gpupack: batches go as the engine's messages: %s", why)
            self.leave(out.slots)
            return super().make(out)
        self._stats.frames += 1
        return self._stamped(frame)

    def send(self, made: Any) -> None:
        """See StepSender."""
        if not isinstance(made, bytearray):
            super().send(made)
            return
        self._send_bytes(made)

    def shown(self, made: Any) -> Any:
        """What a receiver of our own makes of a frame."""
        if not isinstance(made, bytearray):
            return super().shown(made)
        return self._check.expand(bytes(made)) if self._check is not None else made

    def leave(self, slots: NDArray[np.int32]) -> None:
        """End what is open of these slots on the stream."""
        frame = self._frames.close(slots)
        if frame is not None:
            self.shown(self._stamped(frame))
            self.send(frame)

    def _stamped(self, frame: bytearray) -> bytearray:
        stamp(frame, self._stream_id, self._frame_no)
        self._frame_no += 1
        return frame


def message_maker(streamer: Any, engine: EngineVersion, request_states: RequestStates) -> MessageMaker:
    """Makes messages as the engine's sender takes them, or, where that one only pickles them, pickled."""
    messages: Any = import_module("sglang.srt.managers.io_struct")
    sender: Any = import_module("sglang.srt.managers.scheduler_components.output_sender").SenderWrapper
    pickles = getattr(messages, "_USE_PICKLE_IPC", False) and isinstance(streamer.send_to_detokenizer, sender)
    return (PickledMaker if pickles else MessageMaker)(streamer, engine, request_states)


def why_no_frames(streamer: Any, plugins_in_detokenizer: bool) -> str | None:
    """Why this engine's detokenizer does not take frames; None: it does."""
    args = streamer.server_args
    if not plugins_in_detokenizer:
        return "this version's detokenizer loads no plugins"
    if getattr(args, "detokenizer_worker_num", 1) != 1:
        return "several detokenizer workers"
    if getattr(args, "skip_tokenizer_init", False):
        return "no detokenizer (skip_tokenizer_init)"
    return None
