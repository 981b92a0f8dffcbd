"""Extras and ids of logprobs when frames wait and are merged: each request is told the same."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from frames import Row, Step, frame_of
from hypothesis import given
from hypothesis import strategies as st
from output_line import lines, scores
from test_merge import through_pending
from wire_strategies import extras

from gpupack.core import layout as L
from gpupack.core.request import Request
from gpupack.transport.merge import merge_frames
from gpupack.transport.message_columns import OutputColumns
from gpupack.transport.received import ReceivedStep
from gpupack.transport.send_queue import PendingFrames
from gpupack.transport.stream_table import StreamTable
from gpupack.wire.codec import encode_frame
from gpupack.wire.frame import Frame
from gpupack.wire.metadata import InputLogprobs, OpeningRecord, RowExtras, SideRecord

line = lines  # a fixture
SLOTS = 3
KEYS = ("p", "q")

# What a row of one slot does in a frame: how many tokens, and its extras.
_rows = st.tuples(st.integers(0, 3), st.none() | extras, st.dictionaries(st.sampled_from(KEYS), st.integers(0, 3)))
_frames = st.lists(st.tuples(st.dictionaries(st.integers(0, SLOTS - 1), _rows), st.booleans()), min_size=1, max_size=12)


class Sender:
    """Frames of requests that stream: token i of slot s is 100 * s + i, and its logprob is that number."""

    def __init__(self) -> None:
        self.tokens = [0] * SLOTS
        self.scored = [0] * SLOTS
        self.opened = [False] * SLOTS

    def frame(self, rows: dict[int, Any], with_logprobs: bool) -> Frame:
        """One frame; customized info gets values that name their token."""
        made, openings, all_extras = [], [], []
        for index, (slot, (count, extra, keys)) in enumerate(rows.items()):
            start, end = self.tokens[slot], self.tokens[slot] + count
            info = {key: [f"{key}{t}" for t in range(start, min(start + most, end))] for key, most in keys.items()}
            logprobs = None
            if with_logprobs:
                logprobs = [100 * slot + token for token in range(self.scored[slot], end)]
                self.scored[slot] = end
            flags = 0 if self.opened[slot] else L.ROW_OPENING
            if flags:
                openings.append(OpeningRecord(row=index, rid=f"r{slot}", return_logprob=True))
            made.append(Row(slot, 1, [100 * slot + t for t in range(start, end)], end, flags, logprobs=logprobs))
            if extra is not None:
                all_extras.append(msgspec.structs.replace(extra, row=index, customized_info=info or None))
            self.tokens[slot], self.opened[slot] = end, True
        side = SideRecord(openings=openings, extras=all_extras) if openings or all_extras else None
        return frame_of(Step(made, with_logprobs, side=side))


def told(frames: list[Frame]) -> dict[str, Any]:
    """By rid what the receiver was told: what joins, joined; of everything else the newest; ids of logprobs."""
    table = StreamTable(1, 0, SLOTS, None)
    requests: dict[str, dict[str, Any]] = {}
    for number, frame in enumerate(frames):
        frame = frame._replace(stream_id=1, frame_no=number)
        applied = table.apply(frame, table.check(frame))
        step = ReceivedStep(frame, applied.records, (), applied.dropped, applied.score_ids)
        for delta, record in zip(step.deltas(), applied.records, strict=True):
            seen = requests.setdefault(delta.rid, {"states": [], "info": {}, "scores": [], "ids": [], "newest": {}})
            seen["scores"] += delta.logprobs or []
            seen["ids"] += delta.logprob_ids or []
            seen["record"] = msgspec.structs.replace(record, opening=OpeningRecord(row=0, rid=""))
            if delta.extras is not None:
                _fold(seen, delta.extras, delta.completion_tokens - len(delta.token_ids))
    return requests


def _fold(seen: dict[str, Any], extra: RowExtras, position: int) -> None:
    if extra.input_logprobs is not None:
        seen.setdefault("input", extra.input_logprobs)
    if extra.hidden_states is not None:
        seen["states"] = extra.hidden_states if extra.hidden_states_whole else seen["states"] + extra.hidden_states
    for key, values in (extra.customized_info or {}).items():
        known = seen["info"].setdefault(key, {})
        known.update({position + i: value for i, value in enumerate(values or ()) if value is not None})
    for name in ("routed_experts", "indexer_topk", "embedding", "pooled_hidden_state"):
        if getattr(extra, name) is not None:
            seen["newest"][name] = getattr(extra, name)


@given(_frames, st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=6), st.booleans())
def test_merged_frames_tell_the_same(plan, pops, compacted):
    sender = Sender()
    frames = [sender.frame(rows, with_logprobs) for rows, with_logprobs in plan]
    merged = through_pending(frames, pops, compacted)
    expected = told(frames)
    assert told(merged) == expected
    for seen in expected.values():
        assert seen["ids"] == seen["scores"]


@given(_frames, st.integers(700, 1500))
def test_no_merged_frame_passes_the_limit(plan, limit):
    sender = Sender()
    frames = [sender.frame(rows, with_logprobs) for rows, with_logprobs in plan]
    frames = [frame for frame in frames if len(encode_frame(frame)) <= limit]
    pending = PendingFrames(limit)
    for frame in frames:
        pending.add(encode_frame(frame))
    pending.compact()
    while pending:
        assert len(pending.peek()) <= limit
        pending.pop()


def test_padding_counts_towards_the_limit():
    """A key that comes late gets one byte for each token before it."""
    tokens = list(range(2000))
    plain = frame_of(Step([Row(0, 1, tokens, 2000, flags=L.ROW_OPENING)], side=opening("r")))
    late = frame_of(
        Step([Row(0, 1, [1], 2001)], side=SideRecord(extras=[RowExtras(row=0, customized_info={"p": ["x"]})]))
    )
    both = merge_frames([plain, late])
    assert both.side.extras[0].customized_info == {"p": [None] * 2000 + ["x"]}
    size = len(encode_frame(both))
    for limit, frames in ((size - 8, 2), (size + 1000, 1)):
        pending = PendingFrames(limit)
        pending.add(encode_frame(plain))
        pending.add(encode_frame(late))
        pending.compact()
        assert 2 - pending.frames_merged == frames


def opening(rid: str) -> SideRecord:
    return SideRecord(openings=[OpeningRecord(row=0, rid=rid)])


def joined(*made: RowExtras) -> RowExtras:
    """The extras of rows of one token each, merged."""
    frames = [
        frame_of(Step([Row(0, 1, [i], i + 1)], side=SideRecord(extras=[extra])))
        for i, extra in enumerate(made)
    ]  # fmt: skip
    return merge_frames(frames).side.extras[0]


FIRST, SECOND = InputLogprobs([0.5], [1]), InputLogprobs([0.25], [2])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"input_logprobs": FIRST}, {"input_logprobs": SECOND}, {"input_logprobs": FIRST}),
        ({"hidden_states": [[1]]}, {"hidden_states": [[2]]}, {"hidden_states": [[1], [2]]}),
        (
            {"hidden_states": [[1]]},
            {"hidden_states": [[3]], "hidden_states_whole": True},
            {"hidden_states": [[3]], "hidden_states_whole": True},
        ),
        (
            {"hidden_states": [[1]], "hidden_states_whole": True},
            {"hidden_states": [[2]]},
            {"hidden_states": [[1], [2]], "hidden_states_whole": True},
        ),
        ({"time_stats": b"1"}, {"time_stats": b"2"}, {"time_stats": b"2"}),
        ({"time_stats": b"1"}, {"counts": {"image_tokens": 2}}, {"time_stats": b"1", "counts": {"image_tokens": 2}}),
        (
            {"counts": {"image_tokens": 1, "audio_tokens": 3}},
            {"counts": {"image_tokens": 2}},
            {"counts": {"image_tokens": 2, "audio_tokens": 3}},
        ),
        ({"customized_info": {"p": [1]}}, {"customized_info": {"p": [2]}}, {"customized_info": {"p": [1, 2]}}),
        (
            {"customized_info": {"p": [1]}},
            {"customized_info": {"q": [2]}},
            {"customized_info": {"p": [1], "q": [None, 2]}},
        ),
        ({"customized_info": {"p": []}}, {"customized_info": {"p": [2]}}, {"customized_info": {"p": [None, 2]}}),
        ({"customized_info": {"p": None}}, {"customized_info": {"p": None}}, {"customized_info": {"p": None}}),
        ({"customized_info": {"p": None}}, {"customized_info": {"p": [2]}}, {"customized_info": {"p": [None, 2]}}),
        ({"customized_info": {"p": [1]}}, {"customized_info": {"p": None}}, {"customized_info": {"p": [1]}}),
    ],
)  # fmt: skip
def test_what_the_extras_of_one_row_become(old, new, expected):
    assert joined(RowExtras(row=0, **old), RowExtras(row=0, **new)) == RowExtras(row=0, **expected)


def test_columns_that_any_of_the_frames_returned():
    frames = [
        frame_of(Step([Row(0, 1, [i], i + 1)], side=SideRecord(returned=names)))
        for i, names in enumerate((["hidden_states"], ["indexer_topk", "hidden_states"]))
    ]
    assert merge_frames(frames).side.returned == ["hidden_states", "indexer_topk"]


def test_extras_of_a_slow_receiver(line):
    """A socket that takes one frame: the rest waits, merged, and says the same in the end."""
    line = line(frames=1, window=256)
    request = Request("r", return_logprob=True, return_hidden_states=True, return_routed_experts=True)
    (handle,) = line.streamer.admit([request]).tolist()
    steps = 4000  # more than the socket's own buffers take
    line.streamer.attach(handle, input_logprobs=FIRST)
    for token in range(steps):
        line.streamer.attach(
            handle,
            hidden_states=[[float(token)]],
            customized_info={"p": [token]},
            time_stats=b"%d" % token,
            routed_experts=np.full((1, 1, 1), token, np.int32),
        )
        line.streamer.set_counts(np.array([handle]), reasoning_tokens=np.array([token]))
        line.put([handle], [token % 1000], logprobs=scores([-token]))
    assert line.sender.frames_merged > 0
    states, info, logprobs, ids, inputs = [], [], [], [], []
    while len(states) < steps:
        line.sender.flush()
        step = line.receiver.recv(20)
        if step is None:
            continue
        columns = OutputColumns.of(step)
        states += columns.output_hidden_states[0]
        info += columns.customized_info["p"][0]
        logprobs += columns.output_token_logprobs_val[0]
        ids += columns.output_token_logprobs_idx[0]
        inputs += columns.input_token_logprobs_val[0]
        assert columns.time_stats == [b"%d" % (len(states) - 1)]
        assert columns.reasoning_tokens == [len(states) - 1]
        assert columns.routed_experts[0].tolist() == [[[len(states) - 1]]]
    assert states == [[float(token)] for token in range(steps)]
    assert (info, inputs) == (list(range(steps)), [0.5])
    assert logprobs == [-token for token in range(steps)]
    assert ids == [token % 1000 for token in range(steps)]
