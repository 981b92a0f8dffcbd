"""NativeReceiver: frames as the engine's messages, in its detokenizer process."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib import import_module
from typing import Any

import msgspec
import zmq

from gpupack.core.errors import WireError
from gpupack.sglang.frames import NO_RANK
from gpupack.sglang.payload import Payloads
from gpupack.transport.message_columns import OutputColumns
from gpupack.transport.stream_reader import StreamReader
from gpupack.wire.codec import decode
from gpupack.wire.frame import MAGIC

logger = logging.getLogger(__name__)

_blob = msgspec.msgpack.Decoder(tuple[dict[str, Any] | None, list[Any] | None])


class FrameArrived(Exception):  # noqa: N818  (a way out of the engine's function, not a fault)
    """A frame came where the engine expects a message; `data` is it."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data


class Intake(zmq.Socket[bytes]):
    """A second object over the detokenizer's socket, which hands out all but frames."""

    def recv(self, *arguments: Any, **options: Any) -> Any:
        """As `zmq.Socket.recv`; FrameArrived for a frame."""
        data = super().recv(*arguments, **options)
        if data[: len(MAGIC)] == MAGIC:
            raise FrameArrived(data)
        return data


class NativeReceiver:
    """Takes what comes in on the detokenizer's socket: frames are expanded, all else is the engine's.

    The frames are verified and continued by a `StreamReader`.
    """

    def __init__(self) -> None:
        self._reader = StreamReader()
        self._payloads = _Payloads()
        self._intakes: dict[int, Intake] = {}

    def receive(self, original: Any, socket: Any, *arguments: Any, **options: Any) -> Any:
        """In place of the engine's `sock_recv`."""
        intake = self._intakes.get(id(socket))
        if intake is None:
            intake = self._intakes[id(socket)] = Intake(shadow=socket)
        while True:
            try:
                return original(intake, *arguments, **options)
            except FrameArrived as arrived:
                message = self._expand(arrived.data)
            if message is not None:
                return message

    def expand(self, data: bytes) -> Any:
        """The message of a frame; None for one that only ends handles. WireError for one that is refused."""
        step = self._reader.take(decode(data))
        if not step.frame.rows and not step.frame.idle:
            return None
        columns = OutputColumns.of(step)
        message = self._payloads.output(columns)
        if step.frame.dp_rank == NO_RANK and message.dp_ranks is not None:
            message.dp_ranks = [None] * len(message.dp_ranks)
        spans = [spans_of(blob) for blob in columns.time_stats]
        if any(spans):
            message.weight_versions = spans
        return message

    def _expand(self, data: bytes) -> Any:
        try:
            return self.expand(data)
        except WireError as error:
            logger.error(
                "gpupack: a frame from the scheduler was refused, so its requests cannot go on, and the engine ends "
                "as it does for a message of its own that cannot be read (GPUPACK_WIRE=compatible sends no frames): "
                "%s: %s",
                type(error).__name__, error,
            )  # fmt: skip
            raise


class _Payloads(Payloads):
    """Time stats come with the weights' spans; those that say the same are one object."""

    def __init__(self) -> None:
        super().__init__()
        self._one = lru_cache(maxsize=1 << 14)(self._record)

    def _time_stats(self, data: bytes | None) -> Any:
        return self._one(data)

    def _record(self, data: bytes | None) -> Any:
        state = None if data is None else _blob.decode(data)[0]
        return super()._time_stats(msgspec.msgpack.encode(state) if state else None)


def spans_of(blob: bytes | None) -> Any:
    """The weights' spans that came with a row, as the engine's records; None without any."""
    spans = None if blob is None else _blob.decode(blob)[1]
    if not spans:
        return None
    record = import_module("sglang.srt.utils.weight_versions").WeightVersionSpan
    return [msgspec.convert(span, record) for span in spans]
