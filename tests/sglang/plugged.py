"""The package's streamer with the plugin's class in its place."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

from real import VERSION, RealStreamer, Setting, output_streamer

from gpupack.sglang.receiver import NativeReceiver
from gpupack.sglang.settings import Settings
from gpupack.sglang.streamer import streamer_class
from gpupack.sglang.versions import VERSIONS
from gpupack.wire.frame import MAGIC

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper


class Inbox(SenderWrapper):
    """The engine's sender on this in place of a socket; keeps the newest message as the detokenizer's end has it."""

    def __init__(self) -> None:
        super().__init__(self)
        self.message: Any = None
        self._receiver = NativeReceiver()

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        """Take a message that is not pickled."""
        self.message = output

    def send(self, data: Any) -> None:
        """Take a frame or a pickled message; a frame that only ends handles is no message."""
        if data[: len(MAGIC)] == MAGIC:
            self.message = self._receiver.expand(bytes(data)) or self.message
        else:
            self.message = pickle.loads(data)


def plugged(
    setting: Setting, base: Any = None, *, custom: bool = False, scheduler: Any = None, **settings: Any
) -> RealStreamer:
    """The streamer under a setting; `settings` are the plugin's, `verify` is on unless they say otherwise."""
    base = base or output_streamer.SchedulerOutputStreamer
    settings = {"active": True, "verify": True, **settings}
    kind = streamer_class(base, VERSIONS[VERSION], Settings(**settings), custom=custom, scheduler=scheduler)
    return RealStreamer(setting, outbox=Inbox(), kind=kind)
