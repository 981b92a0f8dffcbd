"""Verifier: the engine's own message of a step, and how ours differs from it (GPUPACK_VERIFY=1)."""

from __future__ import annotations

import logging
import math
import struct
from array import array
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from gpupack.sglang.message_pickle import there_and_back

logger = logging.getLogger(__name__)

RESTORED = ("finished_output", "finished_len", "input_logprob_sent")
"""What both streamers change of a request. The cursors in it are moved by the engine's alone: ours are elsewhere."""
WRAPPED = ("time_stats", "customized_info")
LOGGED = 20  # differences of a process


class Verifier:
    """Runs the engine's streamer before ours and puts the requests back as they were."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._logged = 0

    def message(self, reqs: Sequence[Any], return_logprob: bool, skip_req: Any, is_idle_batch: bool) -> Any:
        """What the engine's streamer would send, None for nothing; it moves its own cursors and nothing else."""
        before = [{name: getattr(req, name) for name in RESTORED} for req in reqs]
        outbox, sender = _Outbox(), self._streamer.send_to_detokenizer
        self._streamer.send_to_detokenizer = outbox
        try:
            self._streamer.engine_stream(reqs, return_logprob, skip_req, is_idle_batch)
        finally:
            self._streamer.send_to_detokenizer = sender
            for req, values in zip(reqs, before, strict=True):
                vars(req).update(values)
        return outbox.message

    def compare(self, engine: Any, ours: Any, *, sent: Any) -> int:
        """Number of columns that differ; the first of a process are logged.

        `sent`: what ours was made from: bytes of a frame, or of the engine's own wire. On such a way the engine moves
        the times of a record from one process's clock to another's, with what rounding that brings.
        """
        stats = _expanded if isinstance(sent, bytearray) else _read_back if isinstance(sent, bytes) else None
        if stats is _read_back and ours is not None:
            ours = msgspec.structs.replace(ours, time_stats=[_travelled(record) for record in ours.time_stats])
        wrong = differences(engine, ours, stats)
        for name, expected, got in wrong:
            self._logged += 1
            if self._logged <= LOGGED:
                logger.error("gpupack: %s differs: the engine's %.500r, ours %.500r", name, expected, got)
        return len(wrong)


class _Outbox:
    message: Any = None

    def send_output(self, message: Any) -> None:
        self.message = message


def differences(engine: Any, ours: Any, stats: Any = None) -> list[tuple[str, Any, Any]]:
    """Columns of two messages that differ: name, the engine's value, our value.

    `stats`: what becomes of the engine's time stats before they are compared.
    """
    if engine is None or ours is None:
        return [] if engine is ours else [("message", engine, ours)]
    names = [field.name for field in msgspec.structs.fields(type(engine))]
    unwrap = import_module("sglang.srt.managers.io_struct").unwrap_from_pickle
    values, ours = ({name: getattr(message, name) for name in names} for message in (engine, ours))
    for name in WRAPPED:
        values[name], ours[name] = unwrap(values[name]), unwrap(ours[name])
    if stats is not None:
        values["time_stats"] = [stats(record) for record in values["time_stats"]]
    pairs = [(name, plain(values[name]), plain(ours[name])) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _travelled(record: Any) -> Any:
    """A record that has come by the engine's wire, made to tell what it has: whether it does is not told everywhere."""
    record.enable_metrics = True
    return record


def _read_back(record: Any) -> Any:
    return _travelled(there_and_back(record))


def _expanded(record: Any) -> Any:
    state = record.encode_json()
    if not state:
        return record
    copy = type(record)()
    copy.decode_json(state)
    copy.enable_metrics = True
    return copy


def plain(value: Any) -> Any:
    """Values that compare bit by bit: floats and arrays as their bytes, the package's records as what they send."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, array):
        return ("array", value.typecode, value.tolist())
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if hasattr(value, "detach"):
        value = value.detach().cpu().float().numpy()
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    return plain(value.encode_json()) if hasattr(value, "encode_json") else value
