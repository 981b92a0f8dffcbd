"""Frames: round trip, golden bytes, every cut and every flipped bit. Hostile bytes: `test_fuzz_wire.py`."""

from __future__ import annotations

import random

import numpy as np
import pytest
from frames import POISON, Row, Step, frame_of, packed_step, same_frame
from golden_frames import DP_RANK, FRAME_NO, STEPS, STREAM_ID, golden_frame, kept_frame
from hypothesis import given
from outcomes import assert_like_reference, outcome, reference_outcome
from wire_strategies import steps

from gpupack.core import layout as L
from gpupack.core.errors import FrameTooLargeError, FrameTruncatedError, InputError, SideRecordError
from gpupack.wire.codec import decode, encode_frame
from gpupack.wire.encoder import FrameEncoder
from gpupack.wire.frame import HEADER, Frame, KnownRows, stamp
from gpupack.wire.metadata import SideRecord, decode_side, encode_side


def packed_and_flags(step: Step) -> tuple[object, np.ndarray]:
    """A packed step without the wire's own flags, and these apart, as the streamer has them."""
    own = L.ROW_OPENING | L.ROW_RESTARTED
    row_flags = np.array([row.flags & own for row in step.rows], np.int32)
    rows = [Row(**{**row.__dict__, "flags": row.flags & ~own}) for row in step.rows]
    return packed_step(rows, step.has_logprobs), row_flags


# --- Round trip -----------------------------------------------------------------------------------


@given(steps(), steps())
def test_both_encoders_write_what_decode_reads(first, second):
    encoder = FrameEncoder(dp_rank=2)
    for step in (first, second, first):  # the buffer is reused by another shape and by the first one again
        packed, row_flags = packed_and_flags(step)
        side = encode_side(step.side)
        frame = encoder.encode(packed, step=step.step, row_flags=row_flags, side=side, idle=step.idle)
        expected = frame_of(step, dp_rank=2)
        assert same_frame(decode(frame), expected)
        assert bytes(frame) == bytes(encode_frame(expected))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_sizes_on_both_sides_of_powers_of_two(rows, has_logprobs):
    step = Step(
        [Row(5 * i, 1, [i] * (i % 3), i, logprobs=[-i] * (i % 2) if has_logprobs else None) for i in range(rows)],
        has_logprobs,
    )
    frame = FrameEncoder().encode(packed_step(step.rows, has_logprobs), step=0)
    assert same_frame(decode(frame), frame_of(step))


def test_growing_and_shrinking_leaves_no_old_bytes():
    encoder = FrameEncoder()
    for rows in (1, 900, 3, 2, 901, 1):
        step = Step([Row(i, 1, [POISON], 1) for i in range(rows)])
        assert same_frame(decode(encoder.encode(packed_step(step.rows, False), step=0)), frame_of(step))


def test_columns_are_read_only_views_of_the_message():
    data = golden_frame("side")
    frame = decode(data)
    for column in frame:
        if isinstance(column, np.ndarray):
            assert not column.flags.writeable
            assert not column.size or np.shares_memory(column, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("shift", range(1, 8))
def test_a_buffer_at_an_odd_address_decodes_alike(shift):
    data = golden_frame("side")
    moved = memoryview(bytes(shift) + data)[shift:]
    frame = decode(moved)
    assert same_frame(frame, decode(data))
    assert all(column.flags.aligned for column in frame if isinstance(column, np.ndarray))


# --- What the encoder refuses ---------------------------------------------------------------------


def test_conveyed_rows_are_refused():
    with pytest.raises(InputError, match="conveyed"):
        FrameEncoder().encode(packed_step([Row(1, flags=L.ROW_CONVEYED)], False), step=0)


def test_row_flags_of_another_shape_are_refused():
    with pytest.raises(InputError, match="row_flags"):
        FrameEncoder().encode(packed_step([Row(1), Row(2)], False), step=0, row_flags=np.zeros(1, np.int32))


def test_an_idle_batch_with_rows_is_refused():
    with pytest.raises(InputError, match="idle"):
        FrameEncoder().encode(packed_step([Row(1)], False), step=0, idle=True)


def test_a_frame_over_the_limit_is_refused_and_the_encoder_goes_on():
    encoder = FrameEncoder(max_frame_bytes=512)
    small, large = packed_step([Row(1, tokens=[1])], False), packed_step([Row(1, tokens=[1] * 100)], False)
    before = bytes(encoder.encode(small, step=1))
    with pytest.raises(FrameTooLargeError, match="512"):
        encoder.encode(large, step=1)
    assert bytes(encoder.encode(small, step=1)) == before
    with pytest.raises(FrameTooLargeError):
        encode_frame(frame_of(Step([Row(1, tokens=[1] * 100)])), max_frame_bytes=512)


def test_the_largest_frame_is_the_limit_itself():
    data = golden_frame("plain")
    decode(data, max_frame_bytes=len(data))
    with pytest.raises(FrameTooLargeError, match=str(len(data) - 1)):
        decode(data, max_frame_bytes=len(data) - 1)


# --- Golden bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_golden_bytes(name):
    kept = kept_frame(name)
    assert golden_frame(name) == kept
    expected = frame_of(STEPS[name], stream_id=STREAM_ID, frame_no=FRAME_NO, dp_rank=DP_RANK)
    assert same_frame(decode(kept), expected)


# --- Cuts and flips -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_every_cut_is_a_truncated_frame(name):
    data = kept_frame(name)
    for length in range(len(data)):
        with pytest.raises(FrameTruncatedError, match=str(length)):
            decode(data[:length])
    with pytest.raises(FrameTruncatedError):
        decode(data + bytes(8))


# What a flip in the header does, whichever bit it is; the rest is told by the reference reader.
HEADER_FLIPS = {
    range(0, 4): "FrameMagicError",
    range(4, 6): "FrameVersionError",
    range(6, 8): "FrameSectionError",
    range(8, 24): "stream id or frame number only",
    range(28, 40): "FrameSectionError",
    range(44, 48): "FrameTruncatedError",
    range(48, 56): "step only",
    range(56, 62): "FrameSectionError",
    range(62, 64): "FrameValueError",
}


@pytest.mark.parametrize("name", STEPS)
def test_every_flipped_bit_has_the_stated_outcome(name):
    data = kept_frame(name)
    original = decode(data)
    table_end = HEADER.size + 16 * HEADER.unpack_from(data)[2]
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        got = assert_like_reference(bytes(flipped))
        stated = next((what for where, what in HEADER_FLIPS.items() if bit // 8 in where), None)
        if stated is None and name in ("side", "extras") and bit // 8 in range(table_end - 8, table_end - 4):
            # The count of side bytes, which nothing else states: within its padding the table stays valid.
            assert got in ("FrameSectionError", "FrameValueError", "SideRecordError")
        elif stated is None:
            assert not HEADER.size <= bit // 8 < table_end or got == "FrameSectionError"
        elif stated.endswith("only"):
            assert isinstance(got, Frame)
            same = got._replace(stream_id=STREAM_ID, frame_no=FRAME_NO, step=original.step)
            assert same_frame(same, original)
        elif name == "idle" and bit // 8 in range(28, 32):
            assert got == "FrameValueError"  # an idle batch has no rows
        else:
            assert got == stated


@given(steps(max_rows=3))
def test_flipped_bits_of_any_frame_agree_with_the_reference(step):
    data = bytes(encode_frame(frame_of(step)))
    chooser = random.Random(len(data))
    for _ in range(40):
        flipped = bytearray(data)
        for bit in chooser.choices(range(64 * 8, 8 * len(data)), k=chooser.choice([1, 1, 2])):
            flipped[bit // 8] ^= 1 << bit % 8
        assert isinstance(outcome(bytes(flipped)), str) == isinstance(reference_outcome(bytes(flipped)), str)


# --- Side records ---------------------------------------------------------------------------------

SIDE_BREAKERS = [
    b"",
    b"\xc1",
    b"\x81\xa8openings\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 entries that are not there
    b"\xdf\xff\xff\xff\xff",
    b"\x81\xa8openings" + b"\x91" * 100_000,  # nested beyond any stack
    b"\x81\xa5ended\x91\x01",  # generation 0
    b"\x81\xa7dropped\x91\x01",
    b"\x81\xa8openings\x91\x83\xa3row\x00\xa3rid\xa1a\xa8restarts\xff",
    b"\x81\xa3new\x01",
    b"\x80\x00",  # bytes behind the record
    b"\x81\xa8openings\x91\x82\xa3row\xff\xa3rid\xa1a",
    b"\x81\xa8openings\x91\x82\xa3row\x00\xa3rid\xa1\xff",  # no UTF-8
]


@pytest.mark.parametrize("raw", SIDE_BREAKERS, ids=range(len(SIDE_BREAKERS)))
def test_a_broken_side_record_is_refused(raw):
    with pytest.raises(SideRecordError, match="side record"):
        decode_side(raw)


def test_an_empty_side_record_is_not_sent():
    assert encode_side(None) == encode_side(SideRecord()) == b""


def test_a_stamp_changes_only_stream_and_number():
    data = bytearray(golden_frame("plain"))
    stamp(data, 7, 8)
    frame = decode(data)
    assert (frame.stream_id, frame.frame_no) == (7, 8)
    assert same_frame(frame._replace(stream_id=STREAM_ID, frame_no=FRAME_NO), decode(golden_frame("plain")))


@given(steps(max_rows=4))
def test_rows_that_are_known_change_no_outcome(step):
    original = frame_of(step)
    data = bytes(encode_frame(original))
    known = KnownRows.of(original)
    chooser = random.Random(len(data))
    for _ in range(20):
        flipped = bytearray(data)
        for bit in chooser.choices(range(64 * 8, 8 * len(data)), k=chooser.choice([0, 1, 2])):
            flipped[bit // 8] ^= 1 << bit % 8
        with_known, without = outcome(bytes(flipped), known=known), outcome(bytes(flipped))
        if isinstance(without, str):
            assert with_known == without
        else:
            assert same_frame(with_known, without)
