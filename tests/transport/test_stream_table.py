"""Streams at the receiver: continued without a hole, or refused, and what a new one means for the old."""

from __future__ import annotations

import pytest
from frames import Row, Step, frame_of
from streams import FINAL, Stream, begin, opening, refuse

from gpupack.core import layout as L
from gpupack.core.errors import FrameGapError, FrameValueError, StreamBrokenError, UnknownHandleError
from gpupack.transport.received import ReceivedStep
from gpupack.transport.stream_reader import StreamReader
from gpupack.wire.codec import decode, encode_frame
from gpupack.wire.frame import Frame, stamp


@pytest.fixture
def receiver() -> StreamReader:
    """What a receiver does with frames."""
    return StreamReader(max_slots=256)


# --- What gives a stream up -----------------------------------------------------------------------


def test_a_gap_in_the_frame_numbers(receiver):
    stream = Stream()
    begin(receiver, stream)
    stream.frame()
    refuse(receiver, stream.frame(Row(3, 1, [9], 3)), FrameGapError, "expected frame 1, got 2")
    refuse(receiver, stream.frame(Row(3, 1, [9], 3)), StreamBrokenError, "given up")
    refuse(receiver, frame_of(Step([Row(3, 1, [9], 3)]), stream_id=1, frame_no=1), StreamBrokenError, "given up")


def test_a_frame_that_comes_twice(receiver):
    stream = Stream()
    begin(receiver, stream)
    frame = stream.frame(Row(3, 1, [9], 3))
    receiver.take(frame)
    refuse(receiver, frame, FrameGapError, "expected frame 2, got 1")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (Row(3, 2, [9], 3), "slot 3 generation 2, where generation 1 is open"),
        (Row(4, 1, [9], 1), "slot 4 generation 1, where generation 0 is open"),
        (Row(200, 1, [9], 1), "slot 200"),
    ],
)
def test_a_handle_without_opening_record(receiver, row, match):
    stream = Stream()
    begin(receiver, stream)
    refuse(receiver, stream.frame(row), UnknownHandleError, match)
    refuse(receiver, stream.frame(Row(3, 1, [9], 3)), StreamBrokenError, "given up")


@pytest.mark.parametrize(
    "row",
    [
        Row(3, 1, [9], 4),  # a token is missing
        Row(3, 1, [9], 2),  # a token too many
        Row(3, 1, [], 3),
        Row(3, 1, [], 3, flags=FINAL, code=1),
        Row(3, 1, [9], 3, flags=L.ROW_RESTARTED),  # a restarted count begins at 0
    ],
)
def test_a_visible_length_that_does_not_continue(receiver, row):
    stream = Stream()
    begin(receiver, stream)
    refuse(receiver, stream.frame(row), FrameGapError, "slot 3")


def test_a_stream_that_does_not_begin_at_0_leaves_the_old_one_alone(receiver):
    stream, other = Stream(1), Stream(2)
    begin(receiver, stream)
    other.frame()
    refuse(receiver, other.frame(), FrameGapError, "expected frame 0, got 1")
    refuse(receiver, other.frame(), StreamBrokenError, "given up")
    assert receiver.take(stream.frame(Row(3, 1, [9], 3))).deltas()[0].token_ids == [9]


# --- What a row may do ----------------------------------------------------------------------------


def test_an_output_that_is_cut_behind_what_was_sent(receiver):
    stream = Stream()
    begin(receiver, stream)
    step = receiver.take(stream.frame(Row(3, 1, [], 1, flags=FINAL, code=1, match=5)))
    assert step.deltas()[0].completion_tokens == 1
    refuse(receiver, stream.frame(Row(3, 1, [9], 3)), UnknownHandleError, "slot 3")


def test_a_final_row_closes_and_the_slot_is_taken_again(receiver):
    stream = Stream()
    begin(receiver, stream)
    receiver.take(stream.frame(Row(3, 1, [9], 3, flags=FINAL, code=L.FINISH_LENGTH, match=3)))
    row, record = opening(3, [5], "b", generation=2)
    assert receiver.take(stream.frame(row, b=record)).deltas()[0].rid == "b"


@pytest.mark.parametrize("generation", [1, 2])
def test_a_slot_opens_with_a_higher_generation_only(receiver, generation):
    stream = Stream()
    row, record = opening(3, [5], "a", generation=2)
    receiver.take(stream.frame(row, a=record))
    row, record = opening(3, [5], "b", generation=generation)
    refuse(receiver, stream.frame(row, b=record), FrameValueError, "generation above 2")


def test_a_request_resumes_under_another_handle(receiver):
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    receiver.take(stream.frame(Row(3, 1, [9], 3), ended=[1 << L.SLOT_BITS | 3]))
    row, record = opening(5, [7], "a", tokens_before=3, resumed=True)
    delta = receiver.take(stream.frame(row, a=record)).deltas()[0]
    assert (delta.token_ids, delta.completion_tokens, delta.restarted) == ([7], 4, False)
    assert receiver.lost() == []


def test_old_handle_ends_in_the_frame_that_resumes_it_and_its_slot_is_taken(receiver):
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    taken, taken_record = opening(3, [1], "b", generation=2)
    resumed, resumed_record = opening(5, [7], "a", row=1, tokens_before=2, resumed=True)
    frame = stream.frame(taken, resumed, ended=[1 << L.SLOT_BITS | 3], b=taken_record, a=resumed_record)
    assert [delta.rid for delta in receiver.take(frame).deltas()] == ["b", "a"]
    receiver.take(stream.frame(Row(3, 2, [2], 2), Row(5, 1, [8], 4)))
    assert receiver.lost() == []


def test_a_higher_generation_ends_the_handle_before(receiver):
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    row, record = opening(3, [1], "b", generation=2)
    receiver.take(stream.frame(row, b=record))
    row, record = opening(5, [7], "a", tokens_before=2, resumed=True)
    receiver.take(stream.frame(row, a=record, ended=[1 << L.SLOT_BITS | 3]))
    assert receiver.lost() == []


def test_a_resume_at_another_token_is_a_gap(receiver):
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    row, record = opening(5, [7], "a", tokens_before=1, resumed=True)
    refuse(receiver, stream.frame(row, a=record), FrameGapError, "resume at token 2 after 0 restarts, got 1 after 0")


def test_a_resume_after_a_restart_that_never_came_is_a_gap(receiver):
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    row, record = opening(5, [7], "a", tokens_before=2, resumed=True, restarts=1)
    refuse(receiver, stream.frame(row, a=record), FrameGapError, "after 0 restarts, got 2 after 1")


def test_an_opening_that_does_not_resume_begins_at_token_0(receiver):
    stream = Stream()
    row, record = opening(3, [7], "a", tokens_before=2)
    refuse(
        receiver, stream.frame(row, a=record), FrameGapError, "'a', which does not resume, to open at token 0, got 2"
    )
    stream = Stream(2)
    begin(receiver, stream, slot=4, rid="b")
    refuse(receiver, stream.frame(row, a=record), FrameGapError, "'a', which does not resume")
    refuse(receiver, stream.frame(), StreamBrokenError, "given up")


def test_a_request_does_not_resume_beside_its_old_handle(receiver):
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    row, record = opening(5, [7], "a", row=1, tokens_before=3, resumed=True)
    refuse(receiver, stream.frame(Row(3, 1, [9], 3), row, a=record), FrameValueError, "old handle")


def test_a_request_does_not_open_and_resume_in_one_frame(receiver):
    stream = Stream()
    first, record = opening(1, [7], "a")
    second, again = opening(2, [8], "a", row=1, resumed=True)
    refuse(receiver, stream.frame(first, second, a=record, b=again), FrameValueError, "in one frame")


def test_a_restart_voids_what_came(receiver):
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    row, record = opening(5, [7], "a", resumed=True)
    row.flags |= L.ROW_RESTARTED
    delta = receiver.take(stream.frame(row, a=record)).deltas()[0]
    assert (delta.restarted, delta.token_ids, delta.completion_tokens) == (True, [7], 1)


@pytest.mark.parametrize("opens", [True, False])
def test_restarts_are_counted(receiver, opens):
    """By the opening record, or, in a row of an open handle, by its flag."""
    stream = Stream()
    row, record = opening(3, [5], "a", restarts=4)  # dropped four times before its first row
    receiver.take(stream.frame(row, a=record))
    if opens:
        row, record = opening(4, [7], "a", resumed=True, restarts=5)
        row.flags |= L.ROW_RESTARTED
        receiver.take(stream.frame(row, a=record, ended=[1 << L.SLOT_BITS | 3]))
    else:
        receiver.take(stream.frame(Row(3, 1, [7], 1, flags=L.ROW_RESTARTED)))
    row, record = opening(5, [7], "a", tokens_before=1, resumed=True, restarts=5)
    assert receiver.take(stream.frame(row, a=record)).lost == ()


# --- Requests that are dropped --------------------------------------------------------------------


def test_a_dropped_request_is_named_and_a_retracted_one_is_not(receiver):
    stream = Stream()
    for slot, rid in ((1, "gone"), (2, "retracted"), (3, "goes on")):
        begin(receiver, stream, slot, rid)
    step = receiver.take(stream.frame(Row(1, 1, [9], 3), dropped=[1 << L.SLOT_BITS | 1], ended=[1 << L.SLOT_BITS | 2]))
    assert [delta.rid for delta in step.deltas()] == ["gone"]  # its last row comes before its end
    assert step.dropped == ("gone",)
    row, record = opening(5, [7], "retracted", tokens_before=2, resumed=True)
    step = receiver.take(stream.frame(row, a=record))
    assert (step.dropped, step.lost) == ((), ())
    refuse(receiver, stream.frame(Row(1, 1, [9], 4)), UnknownHandleError, "slot 1")


def test_a_dropped_request_is_not_kept(receiver):
    stream, newer = Stream(1), Stream(2)
    for slot, rid in ((1, "gone"), (2, "retracted")):
        begin(receiver, stream, slot, rid)
    receiver.take(stream.frame(dropped=[1 << L.SLOT_BITS | 1], ended=[1 << L.SLOT_BITS | 2]))
    assert receiver.take(newer.frame()).lost == ("retracted",)
    row, record = opening(1, [7], "retracted", tokens_before=9, resumed=True)
    assert receiver.take(newer.frame(row, a=record)).lost == ("retracted",)
    assert receiver.take(newer.frame(dropped=[1 << L.SLOT_BITS | 1])).dropped == ("retracted",)
    assert receiver.lost() == []  # it had a hole, and ended with it


def test_a_dropped_handle_whose_slot_is_taken_again_in_the_same_frame(receiver):
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    row, record = opening(3, [1], "b", generation=2)
    assert receiver.take(stream.frame(row, b=record, dropped=[1 << L.SLOT_BITS | 3])).dropped == ("a",)
    assert receiver.take(Stream(2).frame()).lost == ("b",)


@pytest.mark.parametrize("slot", [3, 5])
@pytest.mark.parametrize("retracted", [False, True])
def test_a_dropped_rid_that_opens_anew_in_the_same_frame_is_not_named(receiver, slot, retracted):
    """Its text is the new request's; the opening says that the old one is void."""
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    row, record = opening(slot, [1], "a", generation=2)
    ended = [2 << L.SLOT_BITS | slot] if retracted else []
    assert receiver.take(stream.frame(row, b=record, dropped=[1 << L.SLOT_BITS | 3], ended=ended)).dropped == ()
    row, record = opening(9, [1], "a", tokens_before=1, resumed=True)
    assert receiver.take(stream.frame(row, b=record)).lost == ()


@pytest.mark.parametrize("handle", [2 << L.SLOT_BITS | 3, 1 << L.SLOT_BITS | 4, 2**63 - 1])
def test_a_dropped_handle_that_is_not_open_is_passed_over(receiver, handle):
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    assert receiver.take(stream.frame(dropped=[handle])).dropped == ()
    assert receiver.take(stream.frame(Row(3, 1, [9], 3))).deltas()[0].rid == "a"


def test_two_requests_of_one_rid(receiver):
    """A rid that opens anew without being resumed is another request; the first keeps its handle."""
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    begin(receiver, stream, slot=4, rid="a", tokens=1)
    receiver.take(stream.frame(Row(3, 1, [9], 3, flags=FINAL, code=1)))
    assert receiver.take(stream.frame(Row(4, 1, [9], 2))).deltas()[0].rid == "a"
    begin(receiver, stream, slot=5, rid="b")
    begin(receiver, stream, slot=6, rid="b")
    assert receiver.take(stream.frame(ended=[1 << L.SLOT_BITS | 4], dropped=[1 << L.SLOT_BITS | 5])).dropped == ()
    row, record = opening(7, [7], "a", tokens_before=2, resumed=True)
    receiver.take(stream.frame(row, a=record))
    assert receiver.lost() == []


# --- New streams ----------------------------------------------------------------------------------


def test_a_new_stream_reports_what_the_old_one_left_open(receiver):
    old, new = Stream(1), Stream(2)
    for slot, rid in ((1, "whole"), (2, "hole"), (3, "gone"), (4, "anew"), (5, "restarts")):
        begin(receiver, old, slot, rid)
    receiver.take(old.frame(ended=[1 << L.SLOT_BITS | 1]))  # retracted: still without a final row
    row, record = opening(9, [0], "other")
    step = receiver.take(new.frame(row, other=record))
    assert sorted(step.lost) == sorted(receiver.lost()) == ["anew", "gone", "hole", "restarts", "whole"]
    refuse(receiver, old.frame(), StreamBrokenError, "given up or replaced")
    rows, records = zip(
        opening(1, [7], "whole", tokens_before=2, resumed=True),
        opening(2, [7], "hole", row=1, tokens_before=5, resumed=True),
        opening(4, [7], "anew", row=2),
        opening(5, [7], "restarts", row=3, resumed=True),
        strict=True,
    )
    rows[3].flags |= L.ROW_RESTARTED
    step = receiver.take(new.frame(*rows, **{record.rid: record for record in records}))
    assert step.lost == ("hole",)
    assert sorted(receiver.lost()) == ["gone", "hole"]
    # The hole stays one, through a retraction and through another stream.
    receiver.take(new.frame(ended=[1 << L.SLOT_BITS | 2]))
    row, record = opening(2, [7], "hole", generation=2, tokens_before=6, resumed=True)
    assert receiver.take(new.frame(row, hole=record)).lost == ("hole",)
    newest = Stream(3)
    row, record = opening(2, [7], "hole", tokens_before=7, resumed=True)
    assert "hole" in receiver.take(newest.frame(row, hole=record)).lost
    receiver.take(newest.frame(Row(2, 1, [1], 9, flags=FINAL, code=1)))
    assert "hole" not in receiver.lost()


def test_a_lost_restart_shows_at_an_equal_count(receiver):
    """The restarted row was lost with the connection; since then as many tokens were made as this receiver holds."""
    old, new = Stream(1), Stream(2)
    for slot, rid in ((1, "dropped since"), (2, "same"), (3, "restarts")):
        begin(receiver, old, slot, rid)
    rows, records = zip(
        opening(1, [7], "dropped since", tokens_before=2, resumed=True, restarts=1),
        opening(2, [7], "same", row=1, tokens_before=2, resumed=True),
        opening(3, [7], "restarts", row=2, resumed=True, restarts=1),
        strict=True,
    )
    rows[2].flags |= L.ROW_RESTARTED
    step = receiver.take(new.frame(*rows, **{record.rid: record for record in records}))
    assert step.lost == ("dropped since",)
    assert receiver.lost() == ["dropped since"]


def test_what_a_new_receiver_never_had_is_no_hole(receiver):
    """Nothing came and nothing was before: how often the output was dropped in between does not matter."""
    row, record = opening(1, [7], "a", resumed=True, restarts=3)
    assert receiver.take(Stream().frame(row, a=record)).lost == ()


def test_a_restart_ends_a_hole_beside_a_row_that_opens(receiver):
    stream = Stream()
    row, record = opening(1, [7], "hole", tokens_before=2, resumed=True)
    assert receiver.take(stream.frame(row, a=record)).lost == ("hole",)
    row, record = opening(2, [7], "other", row=1)
    receiver.take(stream.frame(Row(1, 1, [1], 1, flags=L.ROW_RESTARTED), row, a=record))
    assert receiver.lost() == []


def test_ranks_have_tables_of_their_own(receiver):
    one, two = Stream(1, dp_rank=0), Stream(2, dp_rank=1)
    begin(receiver, one, rid="a")
    begin(receiver, two, rid="b")
    assert receiver.take(one.frame(Row(3, 1, [9], 3))).deltas()[0].rid == "a"
    assert receiver.take(two.frame(Row(3, 1, [9], 3))).deltas()[0].rid == "b"
    assert receiver.lost(0) == receiver.lost(1) == receiver.lost(7) == []


# --- The same rows, frame after frame -------------------------------------------------------------


def take(receiver: StreamReader, frame: Frame) -> ReceivedStep:
    """Take a frame in as bytes, as `recv` does: its rows may be those of the frame before."""
    data = encode_frame(frame)
    stamp(data, frame.stream_id, frame.frame_no)
    return receiver.take(decode(data, known=receiver.known_rows))


def test_rows_that_stay_the_same_are_looked_up_once_and_checked_all_the_same(receiver):
    stream = Stream()
    (a, first), (b, second) = opening(1, [7], "a"), opening(2, [8], "b", row=1)
    take(receiver, stream.frame(a, b, a=first, b=second))
    for length in (2, 3, 4):
        step = take(receiver, stream.frame(Row(1, 1, [9], length), Row(2, 1, [9], length)))
        assert [(delta.rid, delta.completion_tokens) for delta in step.deltas()] == [("a", length), ("b", length)]
    assert receiver.known_rows(0) is not None
    with pytest.raises(FrameGapError, match="row 1"):
        take(receiver, stream.frame(Row(1, 1, [9], 5), Row(2, 1, [9], 6)))


def test_rows_that_were_the_same_until_one_ended_are_unknown(receiver):
    stream = Stream()
    (a, first), (b, second) = opening(1, [7], "a"), opening(2, [8], "b", row=1)
    take(receiver, stream.frame(a, b, a=first, b=second))
    take(receiver, stream.frame(Row(1, 1, [9], 2), Row(2, 1, [9], 2)))
    ends = Row(2, 1, [9], 3, flags=L.ROW_FINAL, code=L.FINISH_STOP_TOKEN, match=9)
    take(receiver, stream.frame(Row(1, 1, [9], 3), ends))
    with pytest.raises(UnknownHandleError):
        take(receiver, stream.frame(Row(1, 1, [9], 4), Row(2, 1, [9], 4)))


def test_the_same_rows_of_another_rank_are_its_own(receiver):
    one, two = Stream(1, dp_rank=0), Stream(2, dp_rank=1)
    for stream, rid in ((one, "a"), (two, "b")):
        row, record = opening(1, [7], rid)
        take(receiver, stream.frame(row, **{rid: record}))
    for length in (2, 3):
        for stream, rid in ((one, "a"), (two, "b")):
            assert take(receiver, stream.frame(Row(1, 1, [9], length))).deltas()[0].rid == rid


def test_what_is_lost_is_bounded_whatever_the_frames_say():
    receiver = StreamReader(max_slots=4)
    stream = Stream()
    for number in range(60):
        row, record = opening(1, [7], f"r{number}", generation=number + 1, tokens_before=5, resumed=True)
        receiver.take(stream.frame(row, **{record.rid: record}, ended=[(number + 1) << 32 | 1]))
    assert len(receiver.lost()) <= 4
