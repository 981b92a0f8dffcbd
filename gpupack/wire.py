"""Frames in and out: `FrameEncoder` for the hot path, `encode_frame` for any columns, `decode`."""

from __future__ import annotations

import numpy as np

from gpupack import layout as L
from gpupack.errors import ConfigError, InputError
from gpupack.frame import (
    DEFAULT_MAX_FRAME_BYTES,
    HEADER,
    INDEX,
    LARGEST_FRAME_BYTES,
    Buffer,
    Frame,
    Int32,
    Shape,
    as_words,
    check_size,
    plan_frame,
    view_columns,
    write_header,
    write_table,
)
from gpupack.packed import PackedStep
from gpupack.side import decode_side, encode_side
from gpupack.verify import check_columns, check_padding, check_side, check_table, peek

# The row columns of a packed step that go on the wire as they are: adjacent there and here, in one
# order, so that one strided copy moves them all. `match` is last because it may be left out.
ROW_SECTIONS = ("slot", "generation", "flags", "visible_len", "match")
assert tuple(L.ROW_FIELDS)[L.R_SLOT : L.R_SLOT + len(ROW_SECTIONS)] == ROW_SECTIONS
assert tuple(L.WIRE_SECTIONS)[: len(ROW_SECTIONS)] == ROW_SECTIONS
FLAGS_AT = ROW_SECTIONS.index("flags")


def check_max_frame_bytes(value: int) -> int:
    """`value` if it can be a maximum frame size, else ConfigError."""
    if not HEADER.size <= value <= LARGEST_FRAME_BYTES:
        raise ConfigError(f"max_frame_bytes: expected {HEADER.size} to {LARGEST_FRAME_BYTES}, got {value}")
    return value


class FrameEncoder:
    """Writes packed steps as frames into one buffer that it reuses.

    Parameters
    ----------
    dp_rank
        Data-parallel rank that the frames carry.
    max_frame_bytes
        A larger frame raises FrameTooLargeError.
    """

    def __init__(self, dp_rank: int = 0, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        if dp_rank < 0:
            raise ConfigError(f"dp_rank: expected at least 0, got {dp_rank}")
        self.dp_rank = dp_rank
        self.max_frame_bytes = check_max_frame_bytes(max_frame_bytes)
        self._words: Int32 = np.zeros(1 << 10, np.int32)
        self._shape: Shape | None = None

    def encode(
        self,
        packed: PackedStep,
        *,
        step: int,
        row_flags: Int32 | None = None,
        side: bytes = b"",
        idle: bool = False,
    ) -> memoryview:
        """Write one frame; the view is valid until the next call. Does not block.

        Parameters
        ----------
        packed
            A packed step without conveyed rows. `has_logprobs` says whether logprob sections are written.
        step
            Number of the scheduler step.
        row_flags
            int32 `[rows]`, or-ed into the flags column (opening and restarted rows).
        side
            The side record, from `encode_side`.
        idle
            The frame of an idle batch, which has no rows.

        Raises
        ------
        InputError
            A row is still conveyed, `row_flags` has another shape, or an idle batch has rows.
        FrameTooLargeError
            Nothing was written.
        """
        buffer, geometry = packed.buffer, packed.geometry
        header = buffer[: L.HEADER_WORDS].tolist()
        rows, tokens = header[L.H_ROWS], header[L.H_TOKENS]
        logprobs = header[L.H_LOGPROBS] if packed.has_logprobs else None
        start, stride = geometry.column(L.R_SLOT), geometry.row_stride
        block = buffer[start : start + len(ROW_SECTIONS) * stride].reshape(-1, stride)[:, :rows]
        flags = block[FLAGS_AT] if row_flags is None else _join_flags(block[FLAGS_AT], row_flags)
        seen = int(np.bitwise_or.reduce(flags))
        if seen & L.ROW_CONVEYED:
            raise InputError("packed: expected rows that go on the wire, got conveyed ones; pass them through the gate")
        if step < 0 or (idle and rows):
            raise InputError(f"expected a step from 0 and no rows in an idle batch, got step {step}, {rows} rows")
        shape = Shape(rows, tokens, logprobs, seen & L.ROW_FINAL != 0, len(side))
        if shape != self._shape:
            self._arrange(shape)
        self._rows[:] = block[: len(self._rows)]
        if row_flags is not None:
            self._rows[FLAGS_AT] = flags
        start = geometry.column(L.R_TOKEN_INDPTR)
        self._token_indptr[:] = buffer[start : start + rows + 1]
        self._token_ids[:] = buffer[geometry.tokens : geometry.tokens + tokens]
        if logprobs is not None:
            start = geometry.column(L.R_LOGPROB_INDPTR)
            self._logprob_indptr[:] = buffer[start : start + rows + 1]
            self._logprobs[:] = buffer[geometry.logprobs : geometry.logprobs + logprobs]
        if side:
            self._side[:] = side
        write_header(self._frame, shape, self._plan, dp_rank=self.dp_rank, step=step, idle=idle)
        return self._frame

    def _arrange(self, shape: Shape) -> None:
        """Place the sections of frames of `shape`: kept until another comes, as batches seldom change."""
        plan = plan_frame(shape)
        check_size(plan.size, self.max_frame_bytes)
        self._shape = None
        size = plan.size // L.WORD
        if size > len(self._words):
            self._words = np.zeros(2 * size, np.int32)
        words = self._words[:size]
        self._frame = words.data.cast("B")
        write_table(self._frame, plan)
        # Padding, too, is written once: later frames of this shape leave it alone.
        if shape.side_bytes:
            self._frame[plan.side[1] :] = bytes(plan.size - plan.side[1])
        for at in plan.pads:
            words[at] = 0
        places = {index: words[start:end] for index, start, end in plan.words}
        start, rows = plan.words[INDEX["slot"]][1], shape.rows
        count, stride = len(ROW_SECTIONS) - (not shape.match), L.align(rows)
        self._rows = words[start : start + count * stride].reshape(count, stride)[:, :rows]
        self._token_indptr = places[INDEX["token_indptr"]]
        self._token_ids = places[INDEX["token_ids"]]
        if shape.logprobs is not None:
            self._logprob_indptr = places[INDEX["logprob_indptr"]]
            self._logprobs = places[INDEX["logprobs"]]
        self._side = self._frame[slice(*plan.side)]
        self._plan = plan
        self._shape = shape


def _join_flags(flags: Int32, row_flags: Int32) -> Int32:
    if row_flags.shape != flags.shape:
        raise InputError(f"row_flags: expected shape {flags.shape}, got {row_flags.shape}")
    return flags | row_flags


def encode_frame(frame: Frame, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> bytearray:
    """Encode columns as an unstamped frame of its own; not for the hot path. Does not block.

    Which optional sections are written follows from which columns are None. The values are not
    checked, `decode` does that. Raises FrameTooLargeError.
    """
    side = encode_side(frame.side)
    logprobs = None if frame.logprobs is None else len(frame.logprobs)
    shape = Shape(frame.rows, len(frame.token_ids), logprobs, frame.match is not None, len(side))
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


def decode(buffer: Buffer, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> Frame:
    """Peek, verify, then view one frame; any bytes at all may come in. Does not block.

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
    seen = check_columns(frame)
    if plan.side[1]:
        frame = frame._replace(side=decode_side(view[slice(*plan.side)]))
    check_side(frame.side, frame.flags, seen)
    return frame
