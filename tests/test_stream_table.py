"""Streams at the receiver: continued without a hole, or refused, and what a refused frame leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from frames import Row, Step, frame_of, same_frame
from reference_reader import RefusedError, read

from gpupack import layout as L
from gpupack.errors import FrameGapError, FrameValueError, StreamBrokenError, UnknownHandleError, WireError
from gpupack.frame import Frame, stamp
from gpupack.receiver import OutputReceiver
from gpupack.side import OpeningRecord, SideRecord
from gpupack.stream_table import StreamTable
from gpupack.wire import decode, encode_frame

FINAL = L.ROW_FINAL | L.ROW_EARLY
WAIT_MS = 10_000


class Stream:
    """Frames of one stream, numbered."""

    def __init__(self, stream_id: int = 1, dp_rank: int = 0) -> None:
        self.stream_id, self.dp_rank, self.frame_no = stream_id, dp_rank, 0

    def frame(self, *rows: Row, ended: list[int] | None = None, **openings: OpeningRecord) -> Frame:
        """The next frame; `openings` by rid, of the rows with the opening flag."""
        records = [o for o in openings.values()]
        side = SideRecord(openings=records, ended=ended or []) if records or ended else None
        frame = frame_of(
            Step(list(rows), side=side), stream_id=self.stream_id, frame_no=self.frame_no, dp_rank=self.dp_rank
        )
        self.frame_no += 1
        return frame


def opening(
    slot: int, tokens: list[int], rid: str, *, generation: int = 1, row: int = 0, **more: Any
) -> tuple[Any, Any]:
    """A row that opens, and its record."""
    record = OpeningRecord(row=row, rid=rid, **more)
    return Row(slot, generation, tokens, record.tokens_before + len(tokens), L.ROW_OPENING), record


def snapshot(receiver: OutputReceiver) -> Any:
    """Everything that a frame could change, but for streams that were given up."""

    def state(table: StreamTable) -> dict[str, Any]:
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else copy.deepcopy(value)
            for name, value in vars(table).items()
            if name != "broken"
        }

    return {rank: state(table) for rank, table in receiver._tables.items()}


@pytest.fixture
def receiver(tmp_path) -> Iterator[OutputReceiver]:
    """A receiver; most tests hand it frames without a socket."""
    with OutputReceiver(f"ipc://{tmp_path}/output", max_slots=256) as made:
        yield made


def begin(receiver: OutputReceiver, stream: Stream, slot: int = 3, rid: str = "a", tokens: int = 2) -> None:
    """Open a request on a stream."""
    row, record = opening(slot, list(range(tokens)), rid)
    assert receiver.take(stream.frame(row, **{rid: record})).deltas()[0].rid == rid


def refuse(receiver: OutputReceiver, frame: Frame, error: type[WireError], match: str) -> None:
    """The frame raises, and changes nothing."""
    before = snapshot(receiver)
    with pytest.raises(error, match=match):
        receiver.take(frame)
    assert snapshot(receiver) == before


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
    refuse(receiver, stream.frame(row, a=record), FrameGapError, "resume at token 2, got 1")


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


def test_two_requests_of_one_rid(receiver):
    """A rid that opens anew without being resumed is another request; the first keeps its handle."""
    stream = Stream()
    begin(receiver, stream, slot=3, rid="a")
    begin(receiver, stream, slot=4, rid="a", tokens=1)
    receiver.take(stream.frame(Row(3, 1, [9], 3, flags=FINAL, code=1)))
    assert receiver.take(stream.frame(Row(4, 1, [9], 2))).deltas()[0].rid == "a"
    receiver.take(stream.frame(ended=[1 << L.SLOT_BITS | 4]))
    row, record = opening(5, [7], "a", tokens_before=2, resumed=True)
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


def test_ranks_have_tables_of_their_own(receiver):
    one, two = Stream(1, dp_rank=0), Stream(2, dp_rank=1)
    begin(receiver, one, rid="a")
    begin(receiver, two, rid="b")
    assert receiver.take(one.frame(Row(3, 1, [9], 3))).deltas()[0].rid == "a"
    assert receiver.take(two.frame(Row(3, 1, [9], 3))).deltas()[0].rid == "b"
    assert receiver.lost(0) == receiver.lost(1) == receiver.lost(7) == []


# --- Hostile frames -------------------------------------------------------------------------------


def test_slots_are_bounded_over_all_ranks(receiver):
    row, record = opening(256, [1], "a")
    refuse(receiver, Stream().frame(row, a=record), FrameValueError, "slots below 256, got 256")
    row, record = opening(199, [1], "a")
    receiver.take(Stream(1, 0).frame(row, a=record))
    row, record = opening(99, [1], "b")
    refuse(receiver, Stream(2, 1).frame(row, b=record), FrameValueError, "slots below 56, got 99")
    row, record = opening(9, [1], "b")
    receiver.take(Stream(3, 1).frame(row, b=record))


def test_a_frame_that_was_never_stamped(receiver):
    refuse(receiver, Stream(0).frame(), FrameValueError, "stream_id")


def test_every_flipped_bit_of_a_frame_in_mid_stream_leaves_the_table_or_is_refused(receiver):
    """Whatever one flipped bit does to the next frame: an error changes nothing, and nothing but WireErrors comes."""
    stream = Stream()
    begin(receiver, stream)
    frame = stream.frame(Row(3, 1, [9], 3, flags=FINAL, code=L.FINISH_LENGTH, match=3))
    data = encode_frame(frame)
    stamp(data, frame.stream_id, frame.frame_no)
    before = snapshot(receiver)
    table = receiver._tables[0]
    accepted = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            columns = decode(flipped)
            changes = table.check(columns) if columns.stream_id == table.stream_id else None
        except WireError:
            assert snapshot(receiver) == before
            continue
        read(bytes(flipped), 1 << 20)  # the obvious reader takes it too
        # Taken: a token id, the match, the step, the early flag, another finish code, another stream's id.
        accepted += 1
        assert changes is None or same_frame(
            columns._replace(token_ids=frame.token_ids, match=frame.match, flags=frame.flags, step=frame.step), frame
        )
    assert 32 + 32 + 64 + 64 <= accepted <= 32 + 32 + 64 + 64 + 8
    assert receiver.take(decode(data)).deltas()[0].finish_reason == {"type": "length", "length": 3}
    with pytest.raises(RefusedError):
        read(bytes(data[:-1]), 1 << 20)


def test_bytes_from_a_socket_that_are_no_frames(receiver):
    """A refused message is one error at one `recv`; the frames of others come through."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        push.sndtimeo = WAIT_MS
        push.connect(receiver.endpoint)
        stream = Stream()
        row, record = opening(3, [5], "a")
        good = encode_frame(stream.frame(row, a=record))
        stamp(good, 1, 0)
        gap = encode_frame(frame_of(Step([Row(3, 1, [6], 2)])))
        stamp(gap, 1, 2)
        push.send(b"")
        push.send_multipart([b"GPKF", bytes(100)])
        push.send(good)
        push.send(gap)
        push.send(gap)
        names = []
        for _ in range(6):
            try:
                step = receiver.recv(WAIT_MS)
                assert step is not None
                names.append(step.deltas()[0].rid)
            except WireError as error:
                names.append(type(error).__name__)
    assert names == [
        "FrameTruncatedError", "FrameTruncatedError", "FrameMagicError", "a", "FrameGapError", "StreamBrokenError"
    ]  # fmt: skip
