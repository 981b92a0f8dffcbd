"""What a reader checks of a side record beside its types (docs/wire.md); SideRecordError for each cause."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gpupack.core import layout as L
from gpupack.core.errors import SideRecordError
from gpupack.wire.array import Array
from gpupack.wire.frame import Int32
from gpupack.wire.metadata import FINISH_IN_EXTRAS, InputLogprobs, RowExtras, SideRecord

CODE_MASK = L.CODE_MASK << L.ROW_CODE_SHIFT


def check_side(side: SideRecord | None, flags: Int32, seen: int) -> None:
    """Check that the side record names the rows that it must and no others; raises SideRecordError.

    `flags` is the column, `seen` all of it or-ed.
    """
    if side is None:
        if not seen & (L.ROW_OPENING | CODE_MASK):
            return
        side = SideRecord()
    expected = np.flatnonzero(flags & L.ROW_OPENING).tolist()
    if [opening.row for opening in side.openings] != expected:
        raise SideRecordError(f"openings: expected one for each of the {len(expected)} rows with the opening flag")
    for opening in side.openings:
        if opening.tokens_before and flags[opening.row] & L.ROW_RESTARTED:
            raise SideRecordError(f"tokens_before: expected 0 in restarted row {opening.row}")
    _check_extras(side.extras, flags)
    if len(set(side.returned)) != len(side.returned):
        raise SideRecordError(f"returned: expected each name once, got {side.returned}")
    for name, array in (("embeddings", side.embeddings), ("pooled_hidden_states", side.pooled_hidden_states)):
        if array is not None:
            array.check(name)
            if array.shape[:1] != [len(flags)]:
                raise SideRecordError(f"{name}: expected {len(flags)} rows, got shape {array.shape}")


def _check_extras(extras: list[RowExtras], flags: Int32) -> None:
    rows = [extra.row for extra in extras]
    if any(a >= b for a, b in pairwise(rows)) or (rows and rows[-1] >= len(flags)):
        raise SideRecordError(f"extras: expected rising rows below {len(flags)}, got {rows[:8]}")
    codes = flags >> L.ROW_CODE_SHIFT
    with_finish = [extra.row for extra in extras if extra.finish is not None]
    if with_finish != np.flatnonzero(np.isin(codes, FINISH_IN_EXTRAS)).tolist():
        raise SideRecordError(
            f"finish: expected in the extras of rows of finish codes {FINISH_IN_EXTRAS} and no others"
        )
    for extra in extras:
        if extra.input_logprobs is not None:
            check_input_logprobs(extra.input_logprobs)
        if extra.hidden_states_whole and extra.hidden_states is None:
            raise SideRecordError(f"hidden_states_whole: expected hidden_states in row {extra.row}")
        for state in extra.hidden_states or ():
            if isinstance(state, Array):
                state.check("hidden_states")
        for name in ("routed_experts", "indexer_topk", "pooled_hidden_state"):
            array = getattr(extra, name)
            if array is not None:
                array.check(name)


def check_input_logprobs(logprobs: InputLogprobs) -> None:
    """Check that values and ids go together: both or neither, of one length, and so within each position.

    Raises SideRecordError.
    """
    for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        values, ids = getattr(logprobs, f"{name}_val"), getattr(logprobs, f"{name}_idx")
        if _length(values) != _length(ids):
            raise SideRecordError(
                f"input {name}: expected as many values as ids, got {_length(values)} and {_length(ids)} (-1: none)"
            )
        if name == "token_logprobs" or not values:
            continue
        for value, idx in zip(values, ids, strict=True):
            if _length(value) != _length(idx):
                raise SideRecordError(
                    f"input {name}: expected as many values as ids at each position, got {_length(value)} and "
                    f"{_length(idx)}"
                )


def _length(entries: list[object] | None) -> int:
    return -1 if entries is None else len(entries)
