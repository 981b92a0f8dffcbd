"""Hostile frames at a receiver: what they raise, and that they leave nothing behind."""

from __future__ import annotations

import pytest
import zmq
from frames import Row, Step, frame_of, same_frame
from reference_reader import RefusedError, read
from streams import FINAL, WAIT_MS, Stream, begin, opening, refuse, snapshot

from gpupack.core import layout as L
from gpupack.core.errors import FrameValueError, WireError
from gpupack.transport.receiver import OutputReceiver
from gpupack.transport.stream_reader import StreamReader
from gpupack.wire.codec import decode, encode_frame
from gpupack.wire.frame import stamp


@pytest.fixture
def receiver() -> StreamReader:
    """What a receiver does with frames."""
    return StreamReader(max_slots=256)


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


def test_bytes_from_a_socket_that_are_no_frames(tmp_path):
    """A refused message is one error at one `recv`; the frames of others come through."""
    with (
        OutputReceiver(f"ipc://{tmp_path}/output") as receiver,
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
    ):
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
