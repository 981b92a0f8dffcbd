"""Hypothesis strategies for the rows and side records of one frame."""

from __future__ import annotations

import numpy as np
from frames import Row, Step
from hypothesis import strategies as st
from msgspec import structs

from gpupack.core import layout as L
from gpupack.wire.array import DTYPES, Array
from gpupack.wire.metadata import (
    COUNTS,
    FINISH_IN_EXTRAS,
    INT32_MAX,
    RETURNED,
    InputLogprobs,
    OpeningRecord,
    RowExtras,
    SideRecord,
)

token_ids = st.integers(-INT32_MAX - 1, INT32_MAX)  # an invalid id that is reported may be anything
# Bit patterns, as float32 values: NaNs keep theirs in frames, and lose it in a Python float.
logprob_values = st.integers(0, 2**32 - 1).map(lambda bits: np.array([bits], np.uint32).view(np.float32)[0])
# Surrogates cannot be encoded as UTF-8.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
counts = st.integers(0, INT32_MAX)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), texts, st.floats(allow_nan=False))
# What msgpack carries and gives back equal: no NaN, which differs from itself.
values = st.recursive(
    scalars | st.binary(max_size=4), lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=2)
)
details = st.dictionaries(texts, texts | counts, max_size=3)


@st.composite
def _arrays(draw: st.DrawFn) -> Array:
    name = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape, dtype=np.int64)) * DTYPES[name].itemsize
    return Array(name, shape, draw(st.binary(min_size=size, max_size=size)))


arrays = _arrays()


@st.composite
def _input_logprobs(draw: st.DrawFn) -> InputLogprobs:
    """Some of the three kinds; of each position values and ids of one length, or none."""
    floats = st.floats(allow_nan=False)
    columns: dict[str, object] = {}
    if draw(st.booleans()):
        entries = draw(st.lists(st.tuples(st.none() | floats, st.none() | token_ids), max_size=3))
        columns["token_logprobs_val"] = [value for value, _ in entries]
        columns["token_logprobs_idx"] = [idx for _, idx in entries]
    for name in ("top_logprobs", "token_ids_logprobs"):
        if draw(st.booleans()):
            positions = draw(st.lists(st.none() | st.lists(st.tuples(floats, token_ids), max_size=2), max_size=3))
            columns[f"{name}_val"] = [p and [value for value, _ in p] for p in positions]
            columns[f"{name}_idx"] = [p and [idx for _, idx in p] for p in positions]
    return InputLogprobs(**columns)  # type: ignore[arg-type]


# The extras of a row, each kind there or not; the row is for the caller to set.
extras = st.builds(
    RowExtras,
    row=st.just(0),
    input_logprobs=st.none() | _input_logprobs(),
    hidden_states=st.none() | st.lists(arrays | st.lists(st.floats(allow_nan=False), max_size=3), max_size=3),
    routed_experts=st.none() | arrays,
    indexer_topk=st.none() | arrays,
    customized_info=st.none() | st.dictionaries(texts, st.none() | st.lists(values, max_size=3), max_size=3),
    time_stats=st.none() | st.binary(max_size=8),
    cached_tokens_details=st.none() | details,
    counts=st.none() | st.dictionaries(st.sampled_from(COUNTS), counts, max_size=3),
    embedding=st.none()
    | st.floats(allow_nan=False)
    | st.lists(st.floats(allow_nan=False), max_size=3)
    | st.dictionaries(counts, st.floats(allow_nan=False), max_size=2),
    pooled_hidden_state=st.none() | arrays,
).map(lambda extra: structs.replace(extra, hidden_states_whole=bool(extra.hidden_states)))


@st.composite
def rows(draw: st.DrawFn, slot: int, has_logprobs: bool, spec_width: int = 0) -> Row:
    """A row of a slot, without opening."""
    final = draw(st.booleans())
    hidden = draw(st.booleans()) and draw(st.booleans())
    logprobs = draw(st.none() | st.lists(logprob_values, max_size=4)) if has_logprobs else None
    return Row(
        slot=slot,
        generation=draw(st.integers(1, INT32_MAX)),
        tokens=draw(st.lists(token_ids, min_size=hidden, max_size=1 if hidden else 4)),
        visible_len=0 if hidden else draw(counts),
        flags=draw(st.sampled_from([0, L.ROW_EARLY])) | L.ROW_FINAL * final | L.ROW_HIDDEN_TOKEN * hidden,
        code=draw(st.integers(1, len(L.FINISH_CODES) - 1)) if final else 0,
        match=draw(token_ids) if final else 0,
        logprobs=logprobs,
        families=draw(st.lists(token_ids, max_size=5)) if logprobs else (),
        spec=draw(st.lists(counts, min_size=spec_width, max_size=spec_width)),
    )


@st.composite
def steps(draw: st.DrawFn, max_rows: int = 6) -> Step:
    """A valid frame: openings for some rows, extras where the finish code wants them, handles that ended."""
    has_logprobs, spec_width = draw(st.booleans()), draw(st.sampled_from([0, 8, 10]))
    slots = draw(st.lists(st.integers(0, INT32_MAX), unique=True, max_size=max_rows))
    step = Step(
        [draw(rows(slot, has_logprobs, spec_width)) for slot in slots], has_logprobs, draw(st.integers(0, 2**64 - 1))
    )
    openings, row_extras = [], []
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
                    tokens_before=0 if restarted else draw(counts),
                    resumed=draw(st.booleans()),
                    restarts=draw(counts),
                    return_logprob=draw(st.booleans()),
                    return_hidden_states=draw(st.booleans()),
                    cached_tokens_details=draw(st.none() | details),
                    **{name: draw(counts) for name in COUNTS},
                )
            )
        reason = draw(st.dictionaries(texts, scalars, max_size=3)) if row.code in FINISH_IN_EXTRAS else None
        if reason is not None or draw(st.booleans()):
            row_extras.append(structs.replace(draw(extras), row=index, finish=reason))
    ended, dropped = (draw(st.lists(st.integers(1 << L.SLOT_BITS, 2**63 - 1), max_size=2)) for _ in range(2))
    returned = draw(st.lists(st.sampled_from(RETURNED), unique=True))
    if openings or row_extras or ended or dropped or returned:
        step.side = SideRecord(openings, row_extras, ended, dropped, returned)
    step.idle = not slots and draw(st.booleans())
    return step
