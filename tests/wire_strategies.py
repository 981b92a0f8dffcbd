"""Hypothesis strategies for the rows and side records of one frame."""

from __future__ import annotations

import numpy as np
from frames import Row, Step
from hypothesis import strategies as st

from gpupack import layout as L
from gpupack.wire.side import FINISH_IN_EXTRAS, INT32_MAX, OpeningRecord, RowExtras, SideRecord

token_ids = st.integers(-INT32_MAX - 1, INT32_MAX)  # an invalid id that is reported may be anything
# Bit patterns, as float32 values: NaNs keep theirs in frames, and lose it in a Python float.
logprob_values = st.integers(0, 2**32 - 1).map(lambda bits: np.array([bits], np.uint32).view(np.float32)[0])
# Surrogates cannot be encoded as UTF-8.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
counts = st.integers(0, INT32_MAX)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), texts, st.floats(allow_nan=False))


@st.composite
def rows(draw: st.DrawFn, slot: int, has_logprobs: bool) -> Row:
    """A row of a slot, without opening."""
    final = draw(st.booleans())
    return Row(
        slot=slot,
        generation=draw(st.integers(1, INT32_MAX)),
        tokens=draw(st.lists(token_ids, max_size=4)),
        visible_len=draw(counts),
        flags=draw(st.sampled_from([0, L.ROW_EARLY])) | L.ROW_FINAL * final,
        code=draw(st.integers(1, len(L.FINISH_CODES) - 1)) if final else 0,
        match=draw(token_ids) if final else 0,
        logprobs=draw(st.none() | st.lists(logprob_values, max_size=4)) if has_logprobs else None,
    )


@st.composite
def steps(draw: st.DrawFn, max_rows: int = 6) -> Step:
    """A valid frame: openings for some rows, extras where the finish code wants them, handles that ended."""
    has_logprobs = draw(st.booleans())
    slots = draw(st.lists(st.integers(0, INT32_MAX), unique=True, max_size=max_rows))
    step = Step([draw(rows(slot, has_logprobs)) for slot in slots], has_logprobs, draw(st.integers(0, 2**64 - 1)))
    openings, extras = [], []
    for index, row in enumerate(step.rows):
        if draw(st.booleans()):
            restarted = draw(st.booleans())
            row.flags |= L.ROW_OPENING | L.ROW_RESTARTED * restarted
            openings.append(
                OpeningRecord(
                    row=index,
                    rid=draw(texts),
                    worker=draw(st.none() | texts),
                    decoded_text=draw(texts),
                    prompt_tail=draw(st.lists(token_ids, max_size=5)),
                    skip_special_tokens=draw(st.booleans()),
                    prompt_tokens=draw(counts),
                    cached_tokens=draw(counts),
                    tokens_before=0 if restarted else draw(counts),
                    resumed=draw(st.booleans()),
                    restarts=draw(counts),
                )
            )
        if row.code in FINISH_IN_EXTRAS:
            extras.append(RowExtras(row=index, finish=draw(st.dictionaries(texts, scalars, max_size=3))))
    ended, dropped = (draw(st.lists(st.integers(1 << L.SLOT_BITS, 2**63 - 1), max_size=2)) for _ in range(2))
    if openings or extras or ended or dropped:
        step.side = SideRecord(openings, extras, ended, dropped)
    step.idle = not slots and draw(st.booleans())
    return step
