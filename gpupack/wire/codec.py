"""Frames in and out: `decode` for any bytes, `encode_frame` for any columns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpupack.core import layout as L
from gpupack.core.errors import ConfigError
from gpupack.wire.frame import (
    DEFAULT_MAX_FRAME_BYTES,
    HEADER,
    LARGEST_FRAME_BYTES,
    Buffer,
    Frame,
    KnownRows,
    Shape,
    as_words,
    check_size,
    plan_frame,
    view_columns,
    write_header,
    write_table,
)
from gpupack.wire.metadata import decode_side, encode_side
from gpupack.wire.verify import check_columns, check_padding, check_table, peek
from gpupack.wire.verify_metadata import check_side


def check_max_frame_bytes(value: int) -> int:
    """`value` if it can be a maximum frame size, else ConfigError."""
    if not HEADER.size <= value <= LARGEST_FRAME_BYTES:
        raise ConfigError(f"max_frame_bytes: expected {HEADER.size} to {LARGEST_FRAME_BYTES}, got {value}")
    return value


def encode_frame(frame: Frame, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> bytearray:
    """Encode columns as an unstamped frame of its own; not for the hot path. Does not block.

    Which optional sections are written follows from which columns are None. The values are not
    checked, `decode` does that. Raises FrameTooLargeError.
    """
    side = encode_side(frame.side)
    logprobs = None if frame.logprobs is None else len(frame.logprobs)
    families = 0 if frame.families is None else len(frame.families)
    spec_width = 0 if frame.spec is None or not frame.rows else len(frame.spec) // frame.rows
    shape = Shape(frame.rows, len(frame.token_ids), logprobs, frame.match is not None, len(side), families, spec_width)
    plan = plan_frame(shape)
    check_size(plan.size, max_frame_bytes)
    out = bytearray(plan.size)
    words = np.frombuffer(out, np.int32)
    for index, start, end in plan.words:
        words[start:end] = np.ascontiguousarray(frame[index - len(L.WIRE_SECTIONS)]).view(np.int32)
    out[slice(*plan.side)] = side
    write_header(out, shape, plan, dp_rank=frame.dp_rank, step=frame.step, idle=frame.idle)
    write_table(out, plan)
    return out


def decode(
    buffer: Buffer,
    *,
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    known: Callable[[int], KnownRows | None] | None = None,
) -> Frame:
    """Peek, verify, then view one frame; any bytes at all may come in. Does not block.

    `known` gives the rows of a dp rank's newest frame, verified then: if this frame has the same ones, these very
    arrays stand in it, and are not verified again.

    The columns are read-only views of `buffer`, which they keep alive (a copy is made only of a buffer
    that is not aligned to 4 bytes). Raises a subclass of WireError for whatever docs/wire.md refuses
    in the first part of "What a reader checks"; stream id and frame number are the receiver's matter.
    """
    view = memoryview(buffer).toreadonly().cast("B")
    header = peek(view, max_frame_bytes)
    plan = check_table(view, header)
    words = as_words(view)
    check_padding(words, view, plan)
    frame = view_columns(words, header, plan)
    rows = None if known is None else known(header.dp_rank)
    same = rows is not None and rows.are_those_of(view, plan)
    if rows is not None and same:
        frame = frame._replace(slot=rows.slot, generation=rows.generation)
    seen = check_columns(frame, known=same)
    if plan.side[1]:
        frame = frame._replace(side=decode_side(view[slice(*plan.side)]))
    check_side(frame.side, frame.flags, seen)
    return frame
