"""Merging of waiting frames: any merged sequence says the same about every request."""

from __future__ import annotations

import time

import numpy as np
import pytest
from frames import Row, Step, frame_of
from hypothesis import example, given
from hypothesis import strategies as st
from sender_life import Fold, Sender, lives, told, total_tokens

from gpupack.core import layout as L
from gpupack.transport import send_queue as pending_module
from gpupack.transport.merge import merge_frames
from gpupack.transport.received import ReceivedStep
from gpupack.transport.send_queue import PendingFrames
from gpupack.transport.stream_table import StreamTable
from gpupack.wire.codec import decode, encode_frame
from gpupack.wire.frame import Frame, stamp
from gpupack.wire.metadata import OpeningRecord, RowExtras, SideRecord

LIMIT = 1 << 20
HANDLE = 1 << L.SLOT_BITS  # generation 1; the slot goes into the low bits


def through_pending(frames: list[Frame], pops: list[int], compacted: bool, limit: int = LIMIT) -> list[Frame]:
    """Frames after waiting: after frame i, up to `pops[i]` of those that wait are sent; the rest at the end."""
    pending = PendingFrames(limit)
    out: list[Frame] = []

    def pop() -> None:
        data = pending.peek()
        assert len(data) <= limit
        stamp(data, 1, len(out))
        out.append(decode(bytes(data), max_frame_bytes=limit))
        pending.pop()

    for i, frame in enumerate(frames):
        pending.add(encode_frame(frame))
        for _ in range(pops[i % len(pops)]):
            if pending:
                pop()
    if compacted:
        pending.compact()
    while pending:
        pop()
    assert pending.bytes == 0
    assert len(out) + pending.frames_merged == len(frames)
    return out


def received(frames: list[Frame]) -> Fold:
    """What the real tables and deltas make of frames."""
    fold = Fold()
    table = StreamTable(1, 0, 64, None)
    for frame in frames:
        changes = table.check(frame)
        records, dropped, score_ids = table.apply(frame, changes)
        for delta in ReceivedStep(frame, records, (), dropped, score_ids).deltas():
            fold.push(delta)
        for rid in dropped:
            fold.drop(rid)
    assert not table.requests.lost
    return fold


POPS = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=12)


@given(lives, POPS, st.booleans(), st.sampled_from([2, 3, 8]))
@example([([("open", 0, 1)], False), ([("retract", 0, 0)], False), ([("resume", 0, 1)], False)], [0], True, 2)
@example([([("open", 0, 1)], False), ([("retract", 0, 0), ("open", 0, 1)], True)], [0], True, 2)
@example(
    [([("open", 0, 1)], False), ([("drop", 0, 0), ("open", 3, 1)], False), ([("tokens", 0, 1)], False)], [0], True, 2
)
@example([([("open", 0, 1)], False), ([], False), ([("drop", 0, 0)], False), ([("open", 0, 1)], False)], [1], True, 2)
@example([([("open", 0, 1)], False), ([("finish", 3, 1)], False), ([("open", 0, 2)], False)], [0], True, 2)
def test_merged_frames_say_the_same(life, pops, compacted, fan_in):
    frames = Sender().play(life)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_module, "FAN_IN", fan_in)
        merged = through_pending(frames, pops, compacted)
    expected = told(frames).lives
    assert told(merged).lives == expected
    stamped = [frame._replace(stream_id=1, frame_no=i) for i, frame in enumerate(frames)]
    assert received(stamped).lives == expected
    assert received(merged).lives == expected
    assert total_tokens(merged) == total_tokens(frames)


@given(lives, st.integers(600, 1200))
def test_merged_frames_stay_below_the_limit(life, limit):
    frames = Sender().play(life)
    merged = through_pending(frames, [0], True, limit)  # decode checks the limit
    assert told(merged).lives == told(frames).lives


def test_one_row_of_each_kind():
    """Worked by hand: two frames of docs/wire.md's rules, joined."""
    first = Step(
        [Row(4, 1, [1, 2], 2, flags=L.ROW_OPENING), Row(9, 3, [7], 11, flags=L.ROW_EARLY)],
        step=5,
        side=SideRecord(openings=[OpeningRecord(row=0, rid="a")], ended=[HANDLE | 7], dropped=[HANDLE | 9, HANDLE | 8]),
    )
    second = Step(
        [
            Row(2, 1, [8], 1, flags=L.ROW_OPENING, logprobs=[-1.0]),
            Row(9, 3, [], 11, flags=L.ROW_FINAL, code=L.FINISH_HOST),
            Row(4, 1, [3], 3, logprobs=[-2.0]),
        ],
        has_logprobs=True,
        step=6,
        side=SideRecord(
            openings=[OpeningRecord(row=0, rid="b")],
            extras=[RowExtras(row=1, finish={"type": "abort"})],
            ended=[HANDLE | 4],
            dropped=[HANDLE | 2],
        ),
    )
    merged = merge_frames([frame_of(first), frame_of(second)])
    assert merged.slot.tolist() == [4, 9, 2]
    assert merged.generation.tolist() == [1, 3, 1]
    assert merged.flags.tolist() == [
        L.ROW_OPENING,
        L.ROW_EARLY | L.ROW_FINAL | L.FINISH_HOST << L.ROW_CODE_SHIFT,
        L.ROW_OPENING,
    ]
    assert merged.visible_len.tolist() == [3, 11, 1]
    assert merged.match is not None
    assert merged.match.tolist() == [0, 0, 0]
    assert merged.token_indptr.tolist() == [0, 3, 4, 5]
    assert merged.token_ids.tolist() == [1, 2, 3, 7, 8]
    assert merged.logprob_indptr is not None
    assert merged.logprobs is not None
    assert merged.logprob_indptr.tolist() == [0, 1, 1, 2]
    assert merged.logprobs.tolist() == [-2.0, -1.0]
    assert merged.side == SideRecord(
        openings=[OpeningRecord(row=0, rid="a"), OpeningRecord(row=2, rid="b")],
        extras=[RowExtras(row=1, finish={"type": "abort"})],
        ended=[HANDLE | 7, HANDLE | 4],
        dropped=[HANDLE | 9, HANDLE | 8, HANDLE | 2],
    )
    assert (merged.step, merged.idle) == (6, False)
    decode(encode_frame(merged))


APART = {
    "another generation": (Row(1, 1, [5], 1), Row(1, 2, [5], 2)),
    "a request that resumes": (Row(1, 1, [5], 1), Row(2, 1, [5], 2, flags=L.ROW_OPENING)),
    "a row that restarts": (Row(1, 1, [], 0), Row(1, 1, [5], 1, flags=L.ROW_RESTARTED)),
    "a row behind the final one": (Row(1, 1, [], 1, flags=L.ROW_FINAL, code=1), Row(1, 1, [5], 2)),
    "an output that was cut": (Row(1, 1, [5, 6], 2), Row(1, 1, [], 1, flags=L.ROW_FINAL, code=1)),
}


@pytest.mark.parametrize("case", APART)
def test_frames_that_do_not_join(case):
    pending = PendingFrames(LIMIT)
    for row in APART[case]:
        opens = row.flags & L.ROW_OPENING
        side = SideRecord(openings=[OpeningRecord(row=0, rid="x", resumed=True)]) if opens else None
        pending.add(encode_frame(frame_of(Step([row], side=side))))
    pending.compact()
    assert pending.frames_merged == 0


def test_thousands_of_waiting_steps_stay_cheap_and_small():
    rows, steps = 64, 5000
    pending = PendingFrames(64 << 20)
    unmerged = 0
    start = time.process_time()
    first = frame_of(Step([Row(i, 1, [0], 1) for i in range(rows)]))
    for step in range(steps):
        columns = first._replace(visible_len=np.full(rows, step + 1, np.int32), token_ids=np.full(rows, step, np.int32))
        data = encode_frame(columns)
        unmerged += len(data)
        pending.add(data)
    spent = time.process_time() - start
    pending.compact()
    data = pending.peek()
    frame = decode(data, max_frame_bytes=64 << 20)
    assert len(data) == pending.bytes < unmerged / 5
    assert frame.token_ids.reshape(rows, steps).tolist() == [list(range(steps))] * rows
    print(f"{spent / steps * 1e6:.0f} us a step, {unmerged} bytes became {len(data)}")
    assert spent / steps < 1e-3
