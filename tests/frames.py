"""Packed steps and frames for tests, made from plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.packed_output import PackedStep
from gpupack.wire.frame import Frame
from gpupack.wire.metadata import SideRecord

POISON = -0x5EED5EEE  # what a buffer holds where nothing was packed


@dataclass
class Row:
    """One row as a test states it; `logprobs` None: the request did not ask."""

    slot: int
    generation: int = 1
    tokens: Sequence[int] = ()
    visible_len: int = 0
    flags: int = 0
    code: int = 0
    match: int = 0
    logprobs: Sequence[float] | None = None
    families: Sequence[int] = ()
    spec: Sequence[int] = ()

    @property
    def flag_word(self) -> int:
        """Flags and finish code as they are packed."""
        return self.flags | self.code << L.ROW_CODE_SHIFT


@dataclass
class Step:
    """The rows of one frame and what goes beside them."""

    rows: list[Row] = field(default_factory=list)
    has_logprobs: bool = False
    step: int = 0
    idle: bool = False
    side: SideRecord | None = None


def indptr(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Offsets of items of these lengths, int32 `[len + 1]`."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def packed_step(rows: Sequence[Row], has_logprobs: bool, *, spare: int = 3) -> PackedStep:
    """A packed step in a poisoned buffer made for `spare` rows and items more than there are."""
    most = max([1, *(len(row.tokens) for row in rows), *(len(row.logprobs or ()) for row in rows)])
    records = max([0, *(len(row.families) for row in rows)])
    spec_width = max([0, *(len(row.spec) for row in rows)])
    geometry = L.packed_layout(len(rows) + spare, L.PackedShape(most, has_logprobs, records, spec_width))
    buffer = np.full(geometry.size, POISON, np.int32)
    buffer[: L.HEADER_WORDS] = 0
    packed = PackedStep(buffer, geometry, has_logprobs, spec_width=spec_width)
    buffer[L.H_ROWS] = buffer[L.H_BATCH] = len(rows)
    buffer[L.H_TOKENS] = sum(len(row.tokens) for row in rows)
    buffer[L.H_LOGPROBS] = sum(len(row.logprobs or ()) for row in rows)
    buffer[L.H_FAMILIES] = sum(len(row.families) for row in rows)
    buffer[L.H_CONVEYED] = sum(bool(row.flags & L.ROW_CONVEYED) for row in rows)
    buffer[L.H_FINISHED] = sum(bool(row.flags & L.ROW_FINAL) for row in rows)
    packed.column(L.R_SLOT)[:] = [row.slot for row in rows]
    packed.column(L.R_GENERATION)[:] = [row.generation for row in rows]
    packed.column(L.R_FLAGS)[:] = [row.flag_word for row in rows]
    packed.column(L.R_VISIBLE_LEN)[:] = [row.visible_len for row in rows]
    packed.column(L.R_MATCH)[:] = [row.match for row in rows]
    packed.token_indptr[:] = indptr([len(row.tokens) for row in rows])
    packed.logprob_indptr[:] = indptr([len(row.logprobs or ()) for row in rows])
    packed.families_indptr[:] = indptr([len(row.families) for row in rows])
    packed.families[:] = [word for row in rows for word in row.families]
    for counter in range(spec_width):
        packed.spec(counter)[:] = [row.spec[counter] for row in rows]
    packed.token_ids[:] = [token for row in rows for token in row.tokens]
    if has_logprobs:
        packed.logprobs[:] = [value for row in rows for value in row.logprobs or ()]
    return packed


def frame_of(step: Step, *, stream_id: int = 0, frame_no: int = 0, dp_rank: int = 0) -> Frame:
    """The columns of a step as a reader should see them."""
    rows = step.rows
    final = any(row.flags & L.ROW_FINAL for row in rows)

    def column(values: list[int]) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    return Frame(
        stream_id=stream_id,
        frame_no=frame_no,
        dp_rank=dp_rank,
        step=step.step,
        idle=step.idle,
        slot=column([row.slot for row in rows]),
        generation=column([row.generation for row in rows]),
        flags=column([row.flag_word for row in rows]),
        visible_len=column([row.visible_len for row in rows]),
        match=column([row.match for row in rows]) if final else None,
        token_indptr=indptr([len(row.tokens) for row in rows]),
        token_ids=column([token for row in rows for token in row.tokens]),
        logprob_indptr=indptr([len(row.logprobs or ()) for row in rows]) if step.has_logprobs else None,
        logprobs=np.array([x for row in rows for x in row.logprobs or ()], np.float32) if step.has_logprobs else None,
        families_indptr=indptr([len(row.families) for row in rows]) if any(row.families for row in rows) else None,
        families=column([word for row in rows for word in row.families]) if any(row.families for row in rows) else None,
        spec=column([word for words in zip(*(row.spec for row in rows), strict=True) for word in words])
        if any(row.spec for row in rows)
        else None,
        side=step.side,
    )


def same_frame(a: Frame, b: Frame) -> bool:
    """Whether two frames are equal in every column, floats by their bits."""
    for x, y in zip(a, b, strict=True):
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
                return False
        elif x is not y and (isinstance(x, np.ndarray) or isinstance(y, np.ndarray) or x != y):
            return False
    return True
