"""The package's streamer with the plugin's class in its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from real import VERSION, Outbox, RealStreamer, Setting, output_streamer

from gpupack.sglang.host_streamer import streamer_class
from gpupack.sglang.native_receiver import NativeReceiver
from gpupack.sglang.settings import Settings
from gpupack.sglang.versions import VERSIONS


@dataclass
class Inbox(Outbox):
    """Where the plugin sends: keeps the newest message, which it makes of a frame as the detokenizer's end does."""

    receiver: NativeReceiver = field(default_factory=NativeReceiver)

    @property
    def socket(self) -> Inbox:
        """Where frames are sent."""
        return self

    def send(self, data: Any) -> None:
        """Take a frame; one that only ends handles is no message."""
        self.message = self.receiver.expand(bytes(data)) or self.message


def plugged(setting: Setting, base: Any = None, *, custom: bool = False, **settings: Any) -> RealStreamer:
    """The streamer under a setting; `settings` are the plugin's, `verify` is on unless they say otherwise."""
    base = base or output_streamer.SchedulerOutputStreamer
    kind = streamer_class(base, VERSIONS[VERSION], Settings(active=True, **{"verify": True, **settings}), custom=custom)
    return RealStreamer(setting, outbox=Inbox(), kind=kind)
