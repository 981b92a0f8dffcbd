"""FrameEncoder: packed steps as frames, the scheduler's hot path; it loads Numba, which receivers need not."""

from __future__ import annotations

import numpy as np

from gpupack.core import layout as L
from gpupack.core.errors import ConfigError, InputError
from gpupack.core.packed_output import PackedStep
from gpupack.wire.codec import check_max_frame_bytes
from gpupack.wire.copying import copy_sections
from gpupack.wire.frame import (
    DEFAULT_MAX_FRAME_BYTES,
    INDEX,
    Int32,
    Shape,
    check_size,
    plan_frame,
    write_header,
    write_table,
)

# The row columns of a packed step that go on the wire as they are: adjacent there and here, in one
# order, so that one strided copy moves them all. `match` is last because it may be left out.
ROW_SECTIONS = ("slot", "generation", "flags", "visible_len", "match")
assert tuple(L.ROW_FIELDS)[L.R_SLOT : L.R_SLOT + len(ROW_SECTIONS)] == ROW_SECTIONS
assert tuple(L.WIRE_SECTIONS)[: len(ROW_SECTIONS)] == ROW_SECTIONS

NO_FLAGS = np.empty(0, np.int32)


def largest_frame(rows: int, shape: L.PackedShape) -> int:
    """Bytes of the fullest frame of a packer, its side record aside."""
    items = rows * shape.max_items
    logprobs = items if shape.logprobs else None
    return plan_frame(Shape(rows, items, logprobs, True, 0, rows * shape.family_words, shape.spec_width)).size


def frame_bytes(packed: PackedStep, side_bytes: int) -> int:
    """Bytes of the frame of a packed step with a side record of `side_bytes`."""
    return plan_frame(_shape_of(packed, side_bytes)).size


def _shape_of(packed: PackedStep, side_bytes: int) -> Shape:
    header = packed.header_words
    logprobs = header[L.H_LOGPROBS] if packed.has_logprobs else None
    final = header[L.H_FINISHED] != 0
    return Shape(
        header[L.H_ROWS], header[L.H_TOKENS], logprobs, final, side_bytes, header[L.H_FAMILIES], packed.spec_width
    )


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
        self._words: Int32 = np.zeros(1 << 10, np.int32)  # all of the buffer; a frame takes its beginning
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
        buffer, geometry, header = packed.buffer, packed.geometry, packed.header_words
        rows = header[L.H_ROWS]
        if header[L.H_CONVEYED]:
            raise InputError("packed: expected rows that go on the wire, got conveyed ones; pass them through the gate")
        if step < 0 or (idle and rows):
            raise InputError(f"expected a step from 0 and no rows in an idle batch, got step {step}, {rows} rows")
        if row_flags is not None and row_flags.shape != (rows,):
            raise InputError(f"row_flags: expected shape {(rows,)}, got {row_flags.shape}")
        shape = _shape_of(packed, len(side))
        if shape != self._shape:
            self._arrange(shape)
        copy_sections(
            buffer, geometry[:4], self._frame_words, self._places, NO_FLAGS if row_flags is None else row_flags
        )
        if side:
            self._side[:] = side
        write_header(self._frame, shape, self._plan, dp_rank=self.dp_rank, step=step, idle=idle)
        return self._frame

    def _arrange(self, shape: Shape) -> None:
        """Place the sections of frames of `shape`: kept until another comes: at one token a row that is seldom."""
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
        places = {index: start for index, start, _ in plan.words}
        self._frame_words = words
        self._places = np.array(
            [
                places[INDEX["slot"]],
                L.align(shape.rows),
                len(ROW_SECTIONS) - (not shape.match),
                shape.rows,
                places[INDEX["token_indptr"]],
                places[INDEX["token_ids"]],
                shape.tokens,
                places.get(INDEX["logprob_indptr"], 0),
                places.get(INDEX["logprobs"], 0),
                -1 if shape.logprobs is None else shape.logprobs,
                places.get(INDEX["families_indptr"], 0),
                places.get(INDEX["families"], 0),
                shape.families,
                places.get(INDEX["spec"], 0),
                shape.spec_width,
            ],
            np.int64,
        )
        self._side = self._frame[slice(*plan.side)]
        self._plan = plan
        self._shape = shape
