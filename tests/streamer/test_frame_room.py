"""Host columns of more than a frame holds: refused, sent with later rows, or lost and counted; nothing closes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpupack.core.config import PackerConfig
from gpupack.core.errors import InputError
from gpupack.core.request import Request
from gpupack.packer.packer import Packer
from gpupack.streamer.embeddings import EmbeddingGather
from gpupack.streamer.output_streamer import OutputStreamer
from gpupack.transport.message_columns import OutputColumns
from gpupack.transport.receiver import OutputReceiver
from gpupack.transport.sender import OutputSender
from gpupack.wire.metadata import InputLogprobs

FRAME = 32 << 10
STATE = np.zeros(2 << 10, np.float32)  # 8 KiB, of which three go into a frame
BIG = "x" * (14 << 10)


class Pair:
    """Both ends of a socket that takes frames of `FRAME` bytes."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.receiver = OutputReceiver(f"ipc://{path}/room", max_frame_bytes=FRAME)
        sender = OutputSender(self.receiver.endpoint, max_frame_bytes=FRAME)
        packer = Packer(PackerConfig(100, capacity=4, window=4))
        self.streamer = OutputStreamer(packer, sender, gather=EmbeddingGather(1024, max_batch=4), **options)

    def step(self, handles: Any, token: int = 5) -> OutputColumns:
        handles = np.asarray(handles, np.int64)
        scores = np.zeros((len(handles), 1), np.float32)
        self.streamer.send(self.streamer.packer.step(handles, np.full(len(handles), token), logprobs=scores))
        received = self.receiver.recv(5000)
        assert received is not None
        return OutputColumns.of(received)

    @property
    def lost(self) -> int:
        return self.streamer.metrics.snapshot()["dropped_extras"]


@pytest.fixture
def pairs(tmp_path):
    made = []

    def make(**options):
        made.append(Pair(tmp_path, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.streamer.close()
        pair.receiver.close()


def asking(name: str, **options: Any) -> Request:
    return Request(name, return_hidden_states=True, return_routed_experts=True, return_logprob=True, **options)


def bad_columns() -> dict[str, dict[str, Any]]:
    return {
        "hidden_states": {"hidden_states": [STATE] * 4},
        "routed_experts": {"routed_experts": np.zeros(FRAME, np.int8), "time_stats": b"not taken"},
        "customized_info": {"customized_info": {"k": ["x" * FRAME]}},
        "time_stats": {"time_stats": bytes(FRAME)},
        "cached_tokens_details": {"cached_tokens_details": {"k": "x" * FRAME}},
        "input_logprobs": {"input_logprobs": InputLogprobs([0.5] * 4000, [1] * 4000)},
    }


@pytest.mark.parametrize("name", bad_columns())
def test_columns_of_one_request_that_no_frame_could_take_are_refused(pairs, name):
    pair = pairs()
    handles = pair.streamer.admit([asking("a"), asking("b")]).tolist()
    with pytest.raises(InputError, match=rf"^{name}: expected at most \d+ bytes of one request in a frame, got"):
        pair.streamer.attach(handles[0], **bad_columns()[name])
    assert pair.step(handles).time_stats == [None, None]
    assert not pair.streamer._columns.waiting


def test_what_waits_and_what_it_replaces_count(pairs):
    pair = pairs()
    (handle,) = pair.streamer.admit([asking("a")]).tolist()
    for _ in range(3):
        pair.streamer.attach(handle, routed_experts=np.zeros(20 << 10, np.int8))
    pair.streamer.attach(handle, hidden_states=[STATE])
    with pytest.raises(InputError, match="hidden_states: expected at most"):
        pair.streamer.attach(handle, hidden_states=[STATE])
    columns = pair.step([handle])
    assert (len(columns.output_hidden_states[0]), columns.routed_experts[0].shape) == (1, [20 << 10])
    pair.streamer.attach(handle, hidden_states=[STATE] * 2)
    assert pair.lost == 0


def test_what_finds_no_room_goes_with_a_later_row(pairs):
    pair = pairs()
    handles = pair.streamer.admit([asking(name) for name in "abc"])
    states = {}
    for value, handle in enumerate(handles.tolist()):
        states[value] = [np.full(2 << 10, 10 * value + i, np.float32) for i in range(3)]
        pair.streamer.attach(handle, hidden_states=states[value], time_stats=b"s")
    got: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for _ in range(6):
        columns = pair.step(handles)
        for row in range(3):
            got[row] += [state[0] for state in columns.output_hidden_states[row] or ()]
    assert got == {value: [state[0] for state in kept] for value, kept in states.items()}
    assert pair.lost == 0
    assert not pair.streamer._columns.waiting


def test_a_final_row_comes_first_and_what_still_finds_no_room_is_lost_and_counted(pairs):
    pair = pairs()
    a, b, c = pair.streamer.admit([asking("a"), asking("b", max_new_tokens=1), asking("c", max_new_tokens=1)]).tolist()
    for handle in (a, b, c):
        pair.streamer.attach(handle, routed_experts=np.zeros(20 << 10, np.int8))
    columns = pair.step([a, b, c])
    assert [array is not None for array in columns.routed_experts] == [False, True, False]
    assert pair.lost == 1
    assert [array is not None for array in pair.step([a]).routed_experts] == [True]


def test_customized_info_and_whole_hidden_states(pairs):
    pair = pairs(whole_hidden_states=True)
    handles = pair.streamer.admit([asking(name) for name in "abc"])
    for handle in handles.tolist():
        pair.streamer.attach(handle, customized_info={"k": [BIG]}, hidden_states=[[1.0]])
    columns = pair.step(handles)
    assert columns.customized_info == {"k": [[BIG], [BIG], [None]]}
    assert columns.output_hidden_states == [[[1.0]]] * 3
    assert pair.lost == 1
    for handle in handles.tolist():
        pair.streamer.attach(handle, hidden_states=[STATE, STATE])
    first = [states and len(states) for states in pair.step(handles).output_hidden_states]
    assert first == [3, [], []]
    pair.streamer.retire(handles[:1])
    assert [states and len(states) for states in pair.step(handles[1:]).output_hidden_states] == [3, []]
    assert pair.lost == 1


def test_counts_wait_for_room_too(pairs):
    pair = pairs()
    a, b = pair.streamer.admit([asking("a"), asking("b")]).tolist()
    pair.step([a, b])
    room = pair.streamer._columns.room - 2048
    pair.streamer.attach(a, customized_info={"k": ["x" * (room - 100)]})
    for _ in range(3):
        pair.streamer.set_counts(np.array([a, b]), image_tokens=np.array([7, 8]))
        columns = pair.step([a, b])
    assert columns.image_tokens == [7, 8]


def test_opening_records_and_reasons_leave_less(pairs):
    pair = pairs()
    with pytest.raises(InputError, match="decoded_text of a: expected an opening record of at most"):
        pair.streamer.admit([Request("ok"), Request("a", decoded_text="x" * FRAME)])
    handles = pair.streamer.admit([asking(name, decoded_text=BIG) for name in "ab"])
    for handle in handles.tolist():
        pair.streamer.attach(handle, time_stats=bytes(4096))
    assert pair.step(handles).time_stats == [None, None]
    assert pair.step(handles).time_stats == [bytes(4096)] * 2
    pair.streamer.send(pair.streamer.abort(handles, {"type": "abort", "message": "x" * FRAME}))
    columns = OutputColumns.of(pair.receiver.recv(5000))
    assert [reason["message"] for reason in columns.finished_reasons] == ["Aborted"] * 2
    assert pair.lost == 2


def test_embeddings_fill_a_frame_and_what_is_attached_to_them_is_lost(pairs):
    pair = pairs()
    handles = pair.streamer.admit([Request(name) for name in "abcd"])
    for handle in handles.tolist():
        pair.streamer.attach(handle, time_stats=bytes(8192))
    with pytest.raises(InputError, match=r"embeddings: expected at most \d+ bytes beside the columns of a frame"):
        pair.streamer.stream_embeddings(handles, [[0.5] * 1000] * 4)
    assert pair.streamer.stream_embeddings(handles, np.zeros((4, 1024), np.float32)).rows == 4
    assert pair.lost == 3
