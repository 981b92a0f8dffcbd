"""Side records of every kind: arrays, what a reader refuses, and what costs no bytes."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import torch
from frames import Row, Step, frame_of
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import arrays, extras

from gpupack.core.errors import InputError, SideRecordError
from gpupack.wire.array import DTYPES, MAX_DIMENSIONS, Array
from gpupack.wire.codec import decode, encode_frame
from gpupack.wire.metadata import (
    InputLogprobs,
    OpeningRecord,
    RowExtras,
    SideRecord,
    decode_side,
    encode_side,
)


def through_a_frame(side: SideRecord, rows: int = 2) -> SideRecord:
    """A side record after encoding and verification, of a frame of plain rows."""
    frame = frame_of(Step([Row(i, 1, [i], 1) for i in range(rows)], side=side))
    received = decode(bytes(encode_frame(frame))).side
    assert received is not None
    return received


# --- Arrays -----------------------------------------------------------------------------------------

SHAPES = [(), (0,), (3,), (2, 3), (2, 0, 3), (1, 2, 3, 1)]


@pytest.mark.parametrize(("name", "shape"), list(itertools.product(DTYPES, SHAPES)))
def test_arrays_of_every_dtype_and_shape(name, shape):
    values = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape) % 2
    tensor = values.to(getattr(torch, name))
    array = Array.of(tensor)
    array.check("array")
    assert (array.dtype, array.shape) == (name, list(shape))
    assert torch.equal(array.torch(), tensor)
    assert array.tolist() == tensor.tolist()
    if name != "bfloat16":
        assert (
            Array.of(tensor.numpy()) == Array.of(tensor.numpy().astype(tensor.numpy().dtype.newbyteorder(">"))) == array
        )
        assert np.array_equal(array.numpy(), tensor.numpy())


def test_arrays_that_are_not_contiguous_and_bits_of_nan():
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert Array.of(matrix.T[1:]).tolist() == matrix.T[1:].tolist()
    bits = torch.tensor([0x7FC1, -1, 0x3F80], dtype=torch.int16)
    array = Array.of(bits.view(torch.bfloat16)[::2])
    assert array.numpy().tolist() == [0x7FC1, 0x3F80]
    assert array.tolist()[1] == 1.0
    assert not array.numpy().flags.writeable


@pytest.mark.parametrize(
    "value", [[1.0], "text", np.zeros(2, np.complex64), np.array(["a"]), np.zeros((1,) * 33), torch.zeros(1).cfloat()]
)
def test_what_is_no_array_is_refused(value):
    with pytest.raises(InputError, match="array: expected"):
        Array.of(value)


HOSTILE = {
    "expected dtype bool": Array("object", [1], bytes(8)),
    "expected 8 bytes for int64 .1., got 7": Array("int64", [1], bytes(7)),
    "expected 0 bytes for int8 .0, 5., got 1": Array("int8", [0, 5], bytes(1)),
    "expected a shape of at most": Array("int64", [2**31 - 1] * 3, b""),
    "expected a shape of at most .* items, got .0, 21": Array("int64", [0, 2**31 - 1, 2**31 - 1], b""),
    "expected 2 bytes for bfloat16": Array("bfloat16", [], bytes(4)),
}


@pytest.mark.parametrize("message", HOSTILE)
@pytest.mark.parametrize("place", ["routed_experts", "indexer_topk", "pooled_hidden_state", "hidden_states"])
def test_hostile_arrays(message, place):
    array = HOSTILE[message]
    extra = RowExtras(row=1, **{place: [[0.5], array] if place == "hidden_states" else array})
    with pytest.raises(SideRecordError, match=f"{place}: {message}"):
        through_a_frame(SideRecord(extras=[extra]))


def test_arrays_for_all_rows_have_an_entry_for_each():
    for name in ("embeddings", "pooled_hidden_states"):
        fits = SideRecord(**{name: Array.of(np.zeros((2, 3), np.float16))})
        assert through_a_frame(fits) == fits
        for wrong in (np.zeros((3, 3), np.float16), np.zeros((), np.float16)):
            with pytest.raises(SideRecordError, match=f"{name}: expected 2 rows, got shape"):
                through_a_frame(SideRecord(**{name: Array.of(wrong)}))
        with pytest.raises(SideRecordError, match=f"{name}: expected dtype"):
            through_a_frame(SideRecord(**{name: Array("f4", [2], bytes(8))}))


def test_more_dimensions_than_numpy_has_are_refused():
    data = encode_side(SideRecord(embeddings=Array("int8", [1] * (MAX_DIMENSIONS + 1), bytes(1))))
    with pytest.raises(SideRecordError, match="length"):
        decode_side(data)


@given(arrays)
def test_arrays_travel_as_they_are(array):
    side = SideRecord(extras=[RowExtras(row=0, routed_experts=array)])
    assert through_a_frame(side) == side


# --- Other values ------------------------------------------------------------------------------------


@given(st.lists(extras, max_size=3))
def test_extras_of_every_kind_travel_as_they_are(made):
    side = SideRecord(extras=[msgspec.structs.replace(extra, row=row) for row, extra in enumerate(made)])
    received = decode_side(encode_side(side)) if made else side
    assert received == side


MISMATCHED = {
    "input token_logprobs: expected as many values as ids, got 1 and -1": InputLogprobs(token_logprobs_val=[0.5]),
    "input token_logprobs: expected as many values as ids, got 1 and 2": InputLogprobs(
        token_logprobs_val=[None], token_logprobs_idx=[1, 2]
    ),
    "input top_logprobs: expected as many values as ids, got -1 and 0": InputLogprobs(top_logprobs_idx=[]),
    "input top_logprobs: expected as many values as ids at each position, got 1 and 2": InputLogprobs(
        top_logprobs_val=[None, [0.5]], top_logprobs_idx=[None, [1, 2]]
    ),
    "input token_ids_logprobs: expected as many values as ids at each position, got -1 and 1": InputLogprobs(
        token_ids_logprobs_val=[None], token_ids_logprobs_idx=[[1]]
    ),
}


@pytest.mark.parametrize("message", MISMATCHED)
def test_input_logprobs_go_together(message):
    with pytest.raises(SideRecordError, match=message):
        through_a_frame(SideRecord(extras=[RowExtras(row=0, input_logprobs=MISMATCHED[message])]))


def test_whole_hidden_states_need_some():
    with pytest.raises(SideRecordError, match="hidden_states_whole: expected hidden_states in row 1"):
        through_a_frame(SideRecord(extras=[RowExtras(row=1, hidden_states_whole=True)]))


def test_columns_are_named_once():
    with pytest.raises(SideRecordError, match="returned: expected each name once"):
        through_a_frame(SideRecord(returned=["hidden_states", "hidden_states"]))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


UNKNOWN = {
    "a count": {"extras": [{"row": 0, "counts": {"tokens": 1}}]},
    "a negative count": {"extras": [{"row": 0, "counts": {"image_tokens": -1}}]},
    "a column": {"returned": ["logits"]},
    "a detail": {"extras": [{"row": 0, "cached_tokens_details": {"device": 0.5}}]},
    "a shape": {"embeddings": {"dtype": "int8", "shape": [-1], "data": b""}},
    "a key of an array": {"embeddings": {"dtype": "int8", "shape": [], "data": b"\0", "order": "F"}},
    "text as bytes": {"extras": [{"row": 0, "time_stats": "text"}]},
    "an extension": {"extras": [{"row": 0, "customized_info": {"p": [msgspec.msgpack.Ext(5, b"x")]}}]},
    "a time": {"extras": [{"row": 0, "customized_info": {"p": [msgspec.msgpack.Ext(-1, b"\xff" * 12)]}}]},
    "depth": {"extras": [{"row": 0, "customized_info": {"p": [msgspec.Raw(nested(100_000))]}}]},
    "a long name": {"openings": [{"row": 0, "rid": "r" * 4097}]},
    "a long name of a worker": {"openings": [{"row": 0, "rid": "r", "worker": "w" * 4097}]},
    "many scored ids": {"openings": [{"row": 0, "rid": "r", "token_ids_logprob": [1] * 1025}]},
    "long stats": {"extras": [{"row": 0, "time_stats": bytes(2**20 + 1)}]},
    "a key that no dict takes": {"extras": [{"row": 0, "customized_info": {"p": [msgspec.Raw(b"\x81\x80\x01")]}}]},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_hostile_side_records(case):
    with pytest.raises(SideRecordError, match="side record: expected msgpack of a SideRecord, got"):
        decode_side(msgspec.msgpack.encode(UNKNOWN[case]))


def test_what_has_its_default_costs_no_bytes():
    plain = encode_side(SideRecord(openings=[OpeningRecord(row=0, rid="r")]))
    assert msgspec.msgpack.decode(plain) == {"openings": [{"row": 0, "rid": "r"}]}
    assert msgspec.msgpack.decode(encode_side(SideRecord(extras=[RowExtras(row=3)]))) == {"extras": [{"row": 3}]}
    assert encode_side(SideRecord()) == b""


def test_what_has_a_limit_travels_up_to_it():
    opening = OpeningRecord(row=0, rid="\u00e9" * 4096, worker="w" * 4096, token_ids_logprob=[7] * 1024)
    side = SideRecord(openings=[opening], extras=[RowExtras(row=0, time_stats=bytes(2**20))])
    assert decode_side(encode_side(side)) == side
