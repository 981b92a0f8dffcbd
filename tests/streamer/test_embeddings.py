"""stream_embeddings over a real socket: who sends, what each row carries, both policies, refusals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gather_cases import Source, bits

from gpupack.core import layout as L
from gpupack.core.config import EmitPolicy, PackerConfig
from gpupack.core.errors import BufferBusyError, CrashRequestedError, InputError, PeerLostError
from gpupack.core.request import Request
from gpupack.packer.packer import Packer
from gpupack.streamer.embeddings import BITS, ITEM_BYTES, EmbeddingGather
from gpupack.streamer.output_streamer import OutputStreamer
from gpupack.transport.message_columns import EmbeddingColumns
from gpupack.transport.receiver import OutputReceiver, ReceivedStep
from gpupack.transport.sender import OutputSender
from gpupack.wire.metadata import Array, OpeningRecord, SideRecord

TIMEOUT_MS = 5000
LENGTH_0 = {"type": "length", "length": 0}
ABORT = {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequest"}
PRESETS = [EmitPolicy.sglang_0_5_16(), EmitPolicy.sglang_0_5_23()]


class Line:
    """A streamer of embeddings and a receiver at the two ends of a socket."""

    def __init__(self, endpoint: str, gather: EmbeddingGather | None, convey: bool, options: dict[str, Any]) -> None:
        self.receiver = OutputReceiver(endpoint)
        config = PackerConfig(vocab_size=100, **{"capacity": 8, "window": 4, "logprobs": False} | options)
        sender = OutputSender(self.receiver.endpoint)
        self.streamer = OutputStreamer(Packer(config, convey=convey), sender, gather=gather)

    def admit(self, count: int, **fields: Any) -> Any:
        return self.streamer.admit([Request(f"r{i}", [1, 2, 3][: i + 1], **fields) for i in range(count)])

    def send(self, handles: Any, embeddings: Any, **options: Any) -> ReceivedStep | None:
        """One call, and the frame that came of it."""
        report = self.streamer.stream_embeddings(handles, embeddings, **options)
        if not report.frame_bytes:
            assert self.receiver.recv(20) is None
            return None
        step = self.receiver.recv(TIMEOUT_MS)
        assert step is not None
        assert step.frame.rows == report.rows == len(report.finished)
        assert step.frame.idle == (not report.rows)
        return step


@pytest.fixture
def line(tmp_path: Any) -> Iterator[Callable[..., Line]]:
    made: list[Line] = []

    def make(gather: EmbeddingGather | None = None, *, convey: bool = True, **options: Any) -> Line:
        made.append(Line(f"ipc://{tmp_path}/line{len(made)}", gather, convey, options))
        return made[-1]

    yield make
    for one in made:
        one.streamer.close()
        one.receiver.close()


def side_of(step: ReceivedStep | None) -> SideRecord:
    assert step is not None
    assert step.frame.side is not None
    return step.frame.side


def openings(step: ReceivedStep | None) -> list[OpeningRecord]:
    """The opening record of every row: each row of an embedding frame is its request's first and last."""
    records = side_of(step).openings
    assert step is not None
    assert [record.row for record in records] == list(range(step.frame.rows))
    assert (step.frame.flags & (L.ROW_OPENING | L.ROW_FINAL) == L.ROW_OPENING | L.ROW_FINAL).all()
    return records


def rids(step: ReceivedStep | None) -> list[str]:
    return [record.rid for record in openings(step)]


def reasons(step: ReceivedStep | None) -> list[Any]:
    assert step is not None
    return [delta.finish_reason for delta in step.deltas()]


def values(step: ReceivedStep | None) -> list[Any]:
    """List-valued and sparse embeddings, None where a row has none."""
    assert step is not None
    by_row = {extra.row: extra.embedding for extra in side_of(step).extras}
    return [by_row.get(row) for row in range(step.frame.rows)]


# --- dense embeddings -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("gap", [0, 3])
def test_a_tensor_arrives_bit_by_bit_in_batch_order(line, dtype: str, width: int, gap: int) -> None:
    line = line(EmbeddingGather(width, dtype, max_batch=8))
    handles = line.admit(5)[[4, 0, 3, 1, 2]]
    source = Source(dtype, width, 5, gap).tensor(np.random.default_rng(1))
    finished = np.array([True, False, True, True, False])
    step = line.send(handles, source, finished=finished)
    assert rids(step) == ["r4", "r3", "r1"]
    assert reasons(step) == [LENGTH_0] * 3
    array = side_of(step).embeddings
    assert array is not None
    assert (array.dtype, array.shape) == (dtype, [3, width])
    got = np.frombuffer(array.data, BITS[ITEM_BYTES[dtype]]).reshape(3, width)
    assert np.array_equal(got, bits(source)[finished])
    assert not side_of(step).extras


def test_a_numpy_array_and_what_else_a_row_says(line) -> None:
    line = line(EmbeddingGather(2, max_batch=8))
    handles = line.admit(2, http_worker_ipc="worker", cached_tokens=1)
    line.streamer.attach(int(handles[1]), time_stats=b"times", cached_tokens_details={"device": 1, "host": 0})
    line.streamer.set_counts(handles, retraction_counts=np.array([0, 2], np.int32))
    step = line.send(handles, np.array([[1, 2], [3, 4]], np.float32))
    first, second = openings(step)
    assert (first.worker, first.prompt_tokens, first.cached_tokens, first.retraction_counts) == ("worker", 1, 1, 0)
    assert (second.prompt_tokens, second.retraction_counts) == (2, 2)
    assert second.cached_tokens_details == {"device": 1, "host": 0}
    assert [(extra.row, extra.time_stats) for extra in side_of(step).extras] == [(1, b"times")]
    assert step is not None
    assert EmbeddingColumns.of(step) == EmbeddingColumns(
        rids=["r0", "r1"],
        http_worker_ipcs=["worker"] * 2,
        finished_reasons=[LENGTH_0] * 2,
        embeddings=[[1, 2], [3, 4]],
        prompt_tokens=[1, 2],
        cached_tokens=[1, 1],
        cached_tokens_details=[None, {"device": 1, "host": 0}],
        retraction_counts=[0, 2],
        time_stats=[None, b"times"],
        pooled_hidden_states=None,
    )


def test_buffers_come_round_over_many_steps_and_are_free_after_each(line) -> None:
    gather = EmbeddingGather(3, max_batch=8, buffers=1)
    line = line(gather)
    for number in range(20):
        handles = line.admit(1 + number % 8)
        source = np.full((len(handles), 3), number, np.float32)
        array = side_of(line.send(handles, source)).embeddings
        assert array is not None
        assert array.numpy().tolist() == source.tolist()
        gather.check_free()
        line.streamer.retire(handles)


# --- list-valued and sparse embeddings, pooled hidden states ----------------------------------------


def test_lists_sparse_scores_and_none(line) -> None:
    line = line()
    given = [[0.5, -1.5], {3: 0.25, 70000: 1.0}, 0.75, None, [[1.0, 2.0], [3.0, 4.0]], "not looked at"]
    step = line.send(line.admit(6), given, finished=np.array([True] * 5 + [False]))
    assert values(step) == given[:5]
    assert step is not None
    assert EmbeddingColumns.of(step).embeddings == given[:5]
    assert side_of(step).embeddings is None


def test_lists_of_numpy_rows_are_plain_lists_at_the_receiver(line) -> None:
    line = line()
    step = line.send(line.admit(2), [np.array([1.5, 2.5], np.float16), torch.tensor([0.5], dtype=torch.bfloat16)])
    assert values(step) == [[1.5, 2.5], [0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_states_of_one_shape_travel_as_one_stack(line, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    line = line()
    states = torch.randn(4, *shape).to(dtype)
    step = line.send(
        line.admit(4), [None] * 4, pooled_hidden_states=states, finished=np.array([True, False, True, True])
    )
    stacked = side_of(step).pooled_hidden_states
    assert stacked is not None
    assert stacked.shape == [3, *shape]
    assert torch.equal(stacked.torch(), states[[0, 2, 3]])
    assert step is not None
    assert EmbeddingColumns.of(step).pooled_hidden_states == [stacked]


@pytest.mark.parametrize(
    "states",
    [
        [torch.ones(3)],
        [torch.ones(3), torch.ones(4)],
        [torch.ones(3), None],
        [torch.ones(3), torch.ones(3, dtype=torch.float16)],
        [torch.ones(1, 3), torch.ones(3)],
    ],
    ids=["one row", "two shapes", "one is missing", "two dtypes", "two ranks"],
)
def test_other_states_travel_row_by_row(line, states: list[Any]) -> None:
    line = line()
    step = line.send(line.admit(len(states)), [[1.0]] * len(states), pooled_hidden_states=states)
    assert side_of(step).pooled_hidden_states is None
    assert values(step) == [[1.0]] * len(states), "the embedding and the state of a row are in one extras entry"
    assert step is not None
    column = EmbeddingColumns.of(step).pooled_hidden_states
    assert column is not None
    assert len(column) == len(states)
    for array, state in zip(column, states, strict=True):
        assert (array is None) == (state is None)
        if isinstance(array, Array):
            assert array.dtype == str(state.dtype).removeprefix("torch.")
            assert torch.equal(array.torch(), state)


def test_no_states_no_column(line) -> None:
    line = line()
    step = line.send(line.admit(2), [[1.0], [2.0]], pooled_hidden_states=[None, None])
    assert side_of(step).pooled_hidden_states is None
    assert step is not None
    assert EmbeddingColumns.of(step).pooled_hidden_states is None


# --- reasons ----------------------------------------------------------------------------------------


def test_reasons_of_the_call_and_of_the_request(line) -> None:
    line = line()
    requests = [Request(f"r{i}") for i in range(4)]
    handles = line.streamer.admit(requests)
    requests[1].finish_reason = {"type": "stop", "matched": "x"}
    requests[2].finish_reason = {"type": "stop", "matched": "y"}
    step = line.send(handles, [[1.0], [2.0], None, [4.0]], reasons=[None, None, ABORT, {"type": "length", "length": 7}])
    assert reasons(step) == [LENGTH_0, {"type": "stop", "matched": "x"}, ABORT, {"type": "length", "length": 7}]
    assert values(step) == [[1.0], [2.0], None, [4.0]]


@pytest.mark.parametrize("judge", ["engine", "device"])
@pytest.mark.parametrize("convey", [True, False])
def test_requests_of_every_judge(line, judge: str, convey: bool) -> None:
    line = line(EmbeddingGather(1, max_batch=8), convey=convey)
    requests = [Request("a", judge=judge), Request("b", judge="device"), Request("c", judge="engine")]
    handles = line.streamer.admit(requests)
    step = line.send(handles, np.array([[1], [2], [3]], np.float32), finished=np.array([True, False, True]))
    assert rids(step) == ["a", "c"]
    assert side_of(step).embeddings == Array.of(np.array([[1], [3]], np.float32))


# --- who sends --------------------------------------------------------------------------------------


def test_once_per_request_and_nothing_when_nobody_has_finished(line) -> None:
    line = line()
    handles = line.admit(3)
    nobody = np.zeros(3, np.bool_)
    assert line.send(handles, [None] * 3, finished=nobody) is None
    assert rids(line.send(handles, [[1.0]] * 3, finished=np.array([False, True, False]))) == ["r1"]
    assert rids(line.send(handles, [[1.0]] * 3)) == ["r0", "r2"], "r1 has sent"
    assert line.send(handles, [[1.0]] * 3) is None
    assert line.send(handles[:0], []) is None


def test_ended_and_padding_handles_send_nothing(line) -> None:
    line = line(EmbeddingGather(1, max_batch=8))
    old = line.admit(2)
    line.streamer.retire(old)
    new = line.admit(2)
    batch = np.array([old[0], new[1], L.PADDING_HANDLE, new[0]])
    step = line.send(batch, np.array([[1], [2], [3], [4]], np.float32), reasons=[ABORT] * 4)
    assert rids(step) == ["r1", "r0"]
    assert side_of(step).embeddings == Array.of(np.array([[2], [4]], np.float32))
    assert line.streamer.metrics.snapshot()["stale_rows"] == 1


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("convey", [True, False])
def test_presets_send_empty_frames_and_do_not_guard_against_sending_twice(
    line, policy: EmitPolicy, convey: bool
) -> None:
    line = line(EmbeddingGather(1, max_batch=8), policy=policy, convey=convey)
    requests = [Request(f"r{i}", judge=judge) for i, judge in enumerate(("device", "device", "engine"))]
    handles = line.streamer.admit(requests)
    source = np.array([[1], [2], [3]], np.float32)
    empty = line.send(handles, source, finished=np.zeros(3, np.bool_))
    assert empty is not None
    assert (empty.frame.rows, empty.frame.side) == (0, None)
    assert EmbeddingColumns.of(empty) == EmbeddingColumns([], [], [], [], [], [], [], [], [])
    assert rids(line.send(handles, source, finished=np.array([True, False, True]))) == ["r0", "r2"]
    again = line.send(handles, source + 10)
    assert rids(again) == ["r0", "r1", "r2"]
    assert reasons(again) == [LENGTH_0] * 3
    assert side_of(again).embeddings == Array.of(source + 10)
    line.streamer.retire(handles)
    assert line.receiver.lost() == []
    gone = line.send(handles, source)
    assert gone is not None
    assert gone.frame.rows == 0, "ended handles name nobody, under a preset too"
    assert rids(line.send(line.admit(3), source)) == ["r0", "r1", "r2"], "the slots serve again"


def test_under_a_preset_an_ended_handle_begins_nothing_again(line) -> None:
    line = line(policy=PRESETS[0], capacity=1)
    old = line.admit(1)
    line.send(old, [[1.0]])
    line.streamer.retire(old)
    new = line.admit(1)
    line.send(new, [[2.0]])
    slots = line.streamer.packer.slots
    assert (slots.find(int(old[0])), slots.find(-1), slots.find(1 << 40)) == (None, None, None)
    before = line.streamer.packer.backend.state_row(0).tolist()
    gone = line.send(old, [[3.0]])
    assert gone is not None
    assert gone.frame.rows == 0
    assert line.streamer.packer.backend.state_row(0).tolist() == before


def test_calls_of_either_kind_count_for_the_requested_crash(line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS", "3")
    line = line()
    handles = line.admit(3)
    line.send(handles[:1], [[1.0]])
    line.streamer.stream_output(handles[:0], False)
    for number in (1, 2):
        with pytest.raises(CrashRequestedError):
            line.streamer.stream_embeddings(handles[number : number + 1], [[1.0]])
        assert rids(line.receiver.recv(TIMEOUT_MS)) == [f"r{number}"], "it was sent before"


def test_without_a_sender_nothing_happens() -> None:
    packer = Packer(PackerConfig(100, capacity=4, window=4))
    streamer = OutputStreamer(packer, None)
    handles = streamer.admit([Request("a")])
    assert streamer.stream_embeddings(handles, [[1.0]]).rows == 0
    assert not packer.in_flight


# --- refusals ---------------------------------------------------------------------------------------

DENSE = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("embeddings", "options", "match"),
    [
        (DENSE[:1], {}, "embeddings: expected 2 rows, one for each handle"),
        (DENSE.astype(np.float64), {}, "embeddings: expected dtype float32, got float64"),
        (DENSE[:, :2], {}, r"embeddings: expected shape \[rows, 3\], got \(2, 2\)"),
        ([[1.0]], {}, "embeddings: expected a tensor or a list of 2 entries, got list of 1"),
        ("ab", {}, "embeddings: expected a tensor or a list of 2 entries, got str of 2"),
        (None, {}, "embeddings: expected a tensor or a list of 2 entries, got NoneType"),
        ([[1.0], ["x"]], {}, r"embeddings: expected numbers, .* in row 1: .*got `str`"),
        ([[1.0], {"x": 1.0}], {}, r"embeddings: expected numbers, .* in row 1: "),
        ([[1.0], {-1: 1.0}], {}, r"embeddings: expected numbers, .* in row 1: "),
        ([[1.0], object()], {}, "embeddings: expected a value that msgpack can carry"),
        ([[1.0], 2**70], {}, "embeddings: expected a value that msgpack can carry"),
        (DENSE, {"finished": np.ones(3, np.bool_)}, "finished: expected 2 rows"),
        (DENSE, {"finished": np.ones(2, np.int32)}, "finished: expected dtype bool, got int32"),
        (DENSE, {"reasons": [None]}, "reasons: expected 2 entries, got 1"),
        (DENSE, {"reasons": [None, {"why": 1}]}, "reasons: expected dicts with a type, .* got {'why': 1}"),
        (DENSE, {"pooled_hidden_states": [None]}, "pooled_hidden_states: expected 2 entries, got list of 1"),
        (DENSE, {"pooled_hidden_states": 3}, "pooled_hidden_states: expected 2 entries, got int"),
        (DENSE, {"pooled_hidden_states": [None, "x"]}, "pooled_hidden_states: row 1: .*got str"),
        (DENSE, {"pooled_hidden_states": torch.ones(2, 3, device="meta")}, "pooled_hidden_states: row 0: .*on meta"),
    ],
)
def test_a_bad_argument_changes_nothing(line, embeddings: Any, options: dict[str, Any], match: str) -> None:
    line = line(EmbeddingGather(3, max_batch=8))
    handles = line.admit(2)
    with pytest.raises(InputError, match=match):
        line.streamer.stream_embeddings(handles, embeddings, **options)
    assert rids(line.send(handles, DENSE)) == ["r0", "r1"]


@pytest.mark.parametrize("policy", [EmitPolicy(), *PRESETS])
def test_a_batch_that_the_packer_refuses_changes_nothing(line, policy: EmitPolicy) -> None:
    line = line(policy=policy, max_batch=2)
    handles = line.admit(3)
    line.send(handles[:1], [[1.0]])
    sent = line.streamer.packer.backend.state_row(int(handles[0]) & 0xFFFFFFFF).tolist()
    for batch in (handles[[0, 0]], handles):
        with pytest.raises(InputError, match="handles: expected"):
            line.streamer.stream_embeddings(batch, [[1.0]] * len(batch))
    assert line.streamer.packer.backend.state_row(int(handles[0]) & 0xFFFFFFFF).tolist() == sent
    assert rids(line.send(handles[1:], [[1.0]] * 2)) == ["r1", "r2"]


def test_a_tensor_needs_a_gather_that_is_large_enough_and_free(line) -> None:
    without, small = line(), line(EmbeddingGather(3, max_batch=1, buffers=1))
    handles = without.admit(2)
    with pytest.raises(InputError, match=r"embeddings: expected a list, or OutputStreamer\(gather="):
        without.streamer.stream_embeddings(handles, DENSE)
    handles = small.admit(2)
    with pytest.raises(InputError, match="finished: expected at most the gather's max_batch = 1, got 2"):
        small.streamer.stream_embeddings(handles, DENSE)
    held = small.streamer.gather.gather(DENSE, np.array([0], np.int32))
    one = np.array([True, False])
    with pytest.raises(BufferBusyError):
        small.streamer.stream_embeddings(handles, DENSE, finished=one)
    held.release()
    assert rids(small.send(handles, DENSE, finished=one)) == ["r0"]


def test_more_than_a_frame_holds_is_refused_before_anything_changes(line, tmp_path: Any) -> None:
    with (
        OutputReceiver(f"ipc://{tmp_path}/small") as receiver,
        OutputStreamer(
            Packer(PackerConfig(100, capacity=2, window=4, logprobs=False)),
            OutputSender(receiver.endpoint, max_frame_bytes=4096),
            gather=EmbeddingGather(1024, max_batch=2),
        ) as streamer,
    ):
        handles = streamer.admit([Request("a"), Request("b")])
        with pytest.raises(InputError, match=r"embeddings: expected at most 3320 bytes beside .* got 10243"):
            streamer.stream_embeddings(handles, np.zeros((2, 1024), np.float32))
        assert streamer.stream_embeddings(handles, [[1.0]] * 2).rows == 2


def test_a_step_in_flight_goes_first(line) -> None:
    line = line()
    handles = line.admit(1)
    ticket = line.streamer.packer.pack(handles)
    with pytest.raises(InputError, match="stream_embeddings: expected no step in flight, 1 are"):
        line.streamer.stream_embeddings(handles, [[1.0]])
    line.streamer.send(ticket)
    assert rids(line.send(handles, [[1.0]])) == ["r0"]


def is_lost(sender: OutputSender) -> bool:
    try:
        sender.check_peer()
    except PeerLostError:
        return True
    return False


def test_a_receiver_that_has_gone_costs_nothing_and_reopening_sends_all(line, tmp_path: Any) -> None:
    line = line(EmbeddingGather(3, max_batch=8))
    handles = line.admit(2)
    assert rids(line.send(handles, DENSE, finished=np.array([True, False]))) == ["r0"]
    line.receiver.close()
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not is_lost(line.streamer.sender):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(PeerLostError):
        line.streamer.stream_embeddings(handles, DENSE)
    assert not line.streamer.packer.in_flight, "nothing was packed: the same call may come again"
    line.receiver = OutputReceiver(f"ipc://{tmp_path}/other")
    line.streamer.reopen(line.receiver.endpoint)
    assert rids(line.send(handles, DENSE)) == ["r1"]


def test_frames_that_wait_for_a_slow_receiver_arrive_whole(tmp_path: Any) -> None:
    """Those with a tensor go as they are, those with lists are merged: every row comes with its own embedding."""
    with OutputReceiver(f"ipc://{tmp_path}/slow", high_water_mark=1) as receiver:
        sender = OutputSender(receiver.endpoint, high_water_mark=1)
        packer = Packer(PackerConfig(100, capacity=400, window=4, logprobs=False))
        gather = EmbeddingGather(4096, max_batch=2)
        with OutputStreamer(packer, sender, gather=gather) as streamer:
            handles = streamer.admit([Request(f"r{i}") for i in range(400)]).reshape(200, 2)
            dense: list[bool] = []
            while len(dense) < 200 and sender.frames_merged < 10:
                number = len(dense)
                dense.append(number % 16 < 4)
                source = np.full((2, 4096), number, np.float32) + np.array([[0], [0.5]], np.float32)
                streamer.stream_embeddings(handles[number], source if dense[-1] else source.tolist())
            assert sender.frames_merged >= 10, "frames have waited and were merged"
            received: list[tuple[str, float, int]] = []
            deadline = time.monotonic() + TIMEOUT_MS / 1000
            while len(received) < 2 * len(dense):
                sender.flush()
                step = receiver.recv(10)  # not longer: the rest may have to be flushed first
                assert step is not None or time.monotonic() < deadline
                if step is None:
                    continue
                array = side_of(step).embeddings
                rows = values(step) if array is None else array.tolist()
                received += [(rid, row[0], len(set(row))) for rid, row in zip(rids(step), rows, strict=True)]
        assert received == [(f"r{row}", row / 2, 1) for row in range(2 * len(dense))]


@pytest.mark.parametrize("policy", [EmitPolicy(), *PRESETS])
def test_a_dense_batch_of_no_rows(line, policy: EmitPolicy) -> None:
    import torch

    line = line(EmbeddingGather(3, max_batch=2), policy=policy)
    nothing = np.empty(0, np.int64)
    for empty in (np.empty((0, 3), np.float32), torch.empty(0, 3), torch.empty(2, 0, 3)[1]):
        report = line.streamer.stream_embeddings(nothing, empty)
        assert (report.rows, report.frame_bytes > 0) == (0, policy.send_empty)
