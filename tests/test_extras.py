"""Host columns through a real socket: what goes with which row, once, newest or per token (SPEC.md section 3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from output_line import lines, scores

from gpupack import layout as L
from gpupack.cached_tokens import cached_tokens_details
from gpupack.columns import OutputColumns
from gpupack.control import Control
from gpupack.errors import HandleError, InputError
from gpupack.host_columns import HostColumns
from gpupack.request import Request
from gpupack.wire.side import Array, InputLogprobs

line = lines  # a fixture
PROMPT = InputLogprobs(
    token_logprobs_val=[None, -0.5],
    token_logprobs_idx=[11, 12],
    top_logprobs_val=[None, [-0.25, -1.0]],
    top_logprobs_idx=[None, [12, 13]],
    token_ids_logprobs_val=[None, [-3.0]],
    token_ids_logprobs_idx=[None, [14]],
)
INPUT = ("input_token_logprobs_val", "input_token_logprobs_idx", "input_top_logprobs_val", "input_top_logprobs_idx",
         "input_token_ids_logprobs_val", "input_token_ids_logprobs_idx")  # fmt: skip


def input_columns(columns: OutputColumns) -> list:
    return [getattr(columns, name) for name in INPUT]


NONE_OF_THEM = [[[]]] * 6
ALL_OF_THEM = [[entry] for entry in (
    [None, -0.5], [11, 12], [None, [-0.25, -1.0]], [None, [12, 13]], [None, [-3.0]], [None, [14]]
)]  # fmt: skip


# --- Input logprobs: once ---------------------------------------------------------------------------


def test_input_logprobs_go_once_with_the_first_row_after_they_were_attached(line):
    line = line()
    (handle,) = line.streamer.admit([Request("r", [11, 12], return_logprob=True)]).tolist()
    assert input_columns(line.columns([handle], [1], logprobs=scores([-1]))) == NONE_OF_THEM
    line.streamer.attach(handle, input_logprobs=PROMPT)
    assert input_columns(line.columns([handle], [2], logprobs=scores([-1]))) == ALL_OF_THEM
    assert input_columns(line.columns([handle], [3], logprobs=scores([-1]))) == NONE_OF_THEM


def test_input_logprobs_wait_for_a_batch_that_returns_logprobs(line):
    line = line()
    (handle,) = line.streamer.admit([Request("r", return_logprob=True)]).tolist()
    line.streamer.attach(handle, input_logprobs=PROMPT)
    absent = line.columns([handle], [1], logprobs=scores([-1]), return_logprob=False)
    assert input_columns(absent) == [None] * 6
    assert input_columns(line.columns([handle], [2], logprobs=scores([-1]))) == ALL_OF_THEM


def test_input_logprobs_are_not_sent_again_after_a_retraction(line):
    line = line()
    request = Request("r", return_logprob=True)
    (handle,) = line.streamer.admit([request]).tolist()
    line.streamer.attach(handle, input_logprobs=PROMPT)
    line.step([handle], [1], logprobs=scores([-1]))
    resume = line.streamer.retract(handle)
    assert resume.input_logprobs_sent
    for resume in (resume, resume.dropped()):  # noqa: B020
        (handle,) = line.streamer.admit([request], [resume]).tolist()
        line.streamer.attach(handle, input_logprobs=PROMPT)
        assert input_columns(line.columns([handle], [2], logprobs=scores([-1]))) == NONE_OF_THEM
        line.streamer.retract(handle)


def test_input_logprobs_that_no_row_has_carried_survive_a_retraction(line):
    line = line(stream_interval=4)
    request = Request("r", return_logprob=True)
    (handle,) = line.streamer.admit([request]).tolist()
    line.step([handle], [1], logprobs=scores([-1]))
    line.streamer.attach(handle, input_logprobs=PROMPT)
    resume = line.streamer.retract(handle)
    assert not resume.input_logprobs_sent
    (handle,) = line.streamer.admit([request], [resume]).tolist()
    assert input_columns(line.columns([handle], [2, 3, 4, 5], logprobs=scores([-1] * 4))) == ALL_OF_THEM


def test_a_disaggregated_decode_server_never_sends_input_logprobs(line):
    line = line(streamer={"disaggregated_decode": True})
    (handle,) = line.streamer.admit([Request("r", return_logprob=True)]).tolist()
    line.streamer.attach(handle, input_logprobs=PROMPT)
    assert input_columns(line.columns([handle], [1], logprobs=scores([-1]))) == NONE_OF_THEM


# --- Hidden states ----------------------------------------------------------------------------------


def state(token: int) -> list[float]:
    return [float(token), 0.5]


def test_hidden_states_are_those_not_yet_sent(line):
    line = line(stream_interval=2)
    first, other = line.streamer.admit([Request("r", return_hidden_states=True), Request("other")]).tolist()
    line.streamer.attach(first, hidden_states=[[state(-1), state(0)]])  # the prompt's, with the first token
    columns = line.columns([first, other], [0], [7])
    assert columns.output_hidden_states == [[[state(-1), state(0)]], None]
    line.streamer.attach(first, hidden_states=[np.array(state(1), np.float32)])
    line.put([first, other], [1], [])
    line.streamer.attach(first, hidden_states=[torch.tensor(state(2), dtype=torch.bfloat16)])
    assert line.columns([first, other], [2], []).output_hidden_states == [[state(1), state(2)]]
    assert line.columns([first, other], [], [8, 9]).output_hidden_states == [None]


def test_whole_hidden_states_are_all_so_far_and_end_with_the_output(line):
    line = line(streamer={"whole_hidden_states": True})
    (handle,) = line.streamer.admit([Request("r", max_new_tokens=3, return_hidden_states=True)]).tolist()
    assert line.columns([handle], [0]).output_hidden_states == [[]]
    line.streamer.attach(handle, hidden_states=[state(0), state(1)])
    assert line.columns([handle], [1]).output_hidden_states == [[state(0), state(1)]]
    line.streamer.attach(handle, hidden_states=[state(2), state(3), state(4)])
    step = line.step([handle], [2, 3, 4])
    assert OutputColumns.of(step).output_hidden_states == [[state(0), state(1), state(2)]]
    assert step.side.extras[0].hidden_states_whole


def test_new_hidden_states_end_with_the_output_too(line):
    line = line()
    (handle,) = line.streamer.admit([Request("r", max_new_tokens=2, return_hidden_states=True)]).tolist()
    line.streamer.attach(handle, hidden_states=[state(0)])
    line.step([handle], [0])
    line.streamer.attach(handle, hidden_states=[state(1), state(2), state(3)])
    assert line.columns([handle], [1, 2, 3]).output_hidden_states == [[state(1)]]


def test_values_of_tokens_that_are_sampled_again_are_void(line):
    line = line(stream_interval=4, max_in_flight=2)
    request = Request("r", return_hidden_states=True)
    (handle,) = line.streamer.admit([request]).tolist()
    line.streamer.attach(handle, hidden_states=[state(0)], customized_info={"p": ["a"]})
    line.step([handle], [0])
    line.streamer.attach(handle, hidden_states=[state(1), state(9)], customized_info={"p": ["b", "void"]})
    line.put([handle], [1])
    resume = line.streamer.retract(handle, output_len=2)
    (handle,) = line.streamer.admit([request], [resume]).tolist()
    line.streamer.attach(handle, hidden_states=[state(2), state(3), state(4)], customized_info={"p": ["c", "d", "e"]})
    columns = line.columns([handle], [2, 3, 4])
    assert columns.output_hidden_states == [[state(1), state(2), state(3), state(4)]]
    assert columns.customized_info == {"p": [["b", "c", "d", "e"]]}


def test_a_restart_begins_anew(line):
    line = line()
    request = Request("r", return_hidden_states=True)
    (handle,) = line.streamer.admit([request]).tolist()
    line.streamer.attach(handle, hidden_states=[state(0), state(1)], customized_info={"p": [1, 2, 3]})
    line.step([handle], [0, 1])
    (handle,) = line.streamer.admit([request], [line.streamer.retract(handle).dropped()]).tolist()
    line.streamer.attach(handle, hidden_states=[state(5)], customized_info={"q": [4]})
    columns = line.columns([handle], [5])
    assert (columns.output_hidden_states, columns.customized_info) == ([[state(5)]], {"q": [[4]]})


# --- Arrays, and columns that depend on the batch ------------------------------------------------------


@pytest.mark.parametrize("name", ["routed_experts", "indexer_topk"])
def test_the_newest_array_goes_with_the_next_row(line, name):
    line = line(stream_interval=2)
    asks, other = line.streamer.admit([Request("asks", **{f"return_{name}": True}), Request("other")]).tolist()
    old, new = np.arange(6).reshape(1, 2, 3), torch.arange(12, dtype=torch.int32).reshape(2, 2, 3)
    columns = line.columns([asks, other], [0], [7])
    assert getattr(columns, name) == [None, None]
    for array in (old, new):
        line.streamer.attach(asks, **{name: array})
    columns = line.columns([asks, other], [1, 2], [8, 9])
    array, nothing = getattr(columns, name)
    assert (array, nothing) == (Array("int32", [2, 2, 3], new.numpy().tobytes()), None)
    assert torch.equal(array.torch(), new)
    assert getattr(line.columns([asks, other], [3, 4], [6, 6]), name) == [None, None]


def test_a_column_is_there_if_a_request_asked_that_sends_no_row(line):
    line = line(stream_interval=4)
    asks, other = line.streamer.admit(
        [Request("asks", return_hidden_states=True, stream=False), Request("other")]
    ).tolist()
    assert line.columns([other], [1]).output_hidden_states is None
    assert line.columns([asks, other], [1], [1, 2, 3, 4]).output_hidden_states == [None]
    control = Control(2).reset(2)
    control.flags[0] = L.CONTROL_SKIP
    assert line.columns([asks, other], [1], [1, 2, 3, 4], control=control).output_hidden_states is None
    assert line.step([other], [5, 6, 7, 8]).frame.side is None
    line.streamer.retire(np.array([asks]))
    assert not line.packer.keep_handles


def test_a_handle_that_ended_does_not_ask(line):
    line = line(max_in_flight=2)
    asks, other = line.streamer.admit([Request("asks", return_hidden_states=True), Request("other")]).tolist()
    tickets = [line.packer.step(np.array([asks, other]), np.array([1, 2])) for _ in range(2)]
    line.streamer.send(tickets[0])
    assert OutputColumns.of(line.receive()).output_hidden_states == [[], None]
    line.streamer.retire(np.array([asks]))
    line.streamer.admit([Request("again", return_hidden_states=True)])  # in the slot of the one that asked
    line.streamer.send(tickets[1])
    assert OutputColumns.of(line.receive()).output_hidden_states is None


# --- Customized info --------------------------------------------------------------------------------


def test_customized_info_is_filled_up_for_rows_without_a_key(line):
    line = line()
    r0, r1, r2 = line.streamer.admit([Request(f"r{i}") for i in range(3)]).tolist()
    line.streamer.attach(r1, customized_info={"p": [1, 2, 3]})
    line.streamer.attach(r2, customized_info={"q": [{"deep": [4]}]})
    assert line.columns([r0, r1, r2], [1, 2], [1, 2, 3], [1]).customized_info == {
        "p": [[None, None], [1, 2, 3], [None]],
        "q": [[None, None], [None, None, None], [{"deep": [4]}]],
    }
    assert line.columns([r0], [1]).customized_info is None


def test_customized_info_is_sliced_by_the_token_cursor_and_not_padded(line):
    line = line(stream_interval=2)
    (handle,) = line.streamer.admit([Request("r", max_new_tokens=6)]).tolist()
    line.streamer.attach(handle, customized_info={"p": ["a"], "none": None})
    assert line.columns([handle], [1]).customized_info == {"p": [["a"]], "none": [[None]]}
    line.streamer.attach(handle, customized_info={"p": ["b"], "late": ["0", "1", "2", "3"]})
    # One value of two came in time; of the late key those before the cursor are not sent.
    assert line.columns([handle], [2, 3]).customized_info == {
        "p": [["b"]], "none": [[None, None]], "late": [["1", "2"]]
    }  # fmt: skip
    line.streamer.attach(handle, customized_info={"p": ["c too late", "d"]})
    assert line.columns([handle], [4, 5]).customized_info == {
        "p": [["d"]], "none": [[None, None]], "late": [["3"]]
    }  # fmt: skip
    line.streamer.attach(handle, customized_info={"p": ["e", "f", "behind the end"], "none": [1]})
    assert line.columns([handle], [6, 7]).customized_info == {"p": [["f"]], "none": [[]], "late": [[]]}


# --- Counts, details, time stats ------------------------------------------------------------------------


COUNTS = {"cached_tokens": 1, "reasoning_tokens": 2, "retraction_counts": 3, "image_tokens": 4, "audio_tokens": 5,
          "video_tokens": 6}  # fmt: skip


def counts(columns: OutputColumns, row: int = 0) -> dict[str, int]:
    return {name: getattr(columns, name)[row] for name in COUNTS}


def test_counts_go_with_the_opening_record_and_later_when_they_change(line):
    line = line()
    a, b = line.streamer.admit([Request("a", cached_tokens=9), Request("b")]).tolist()
    line.streamer.set_counts(np.array([a]), **{name: np.array([value]) for name, value in COUNTS.items()})
    step = line.step([a, b], [1], [2])
    assert step.side.extras == []
    assert counts(OutputColumns.of(step)) == COUNTS
    assert set(counts(OutputColumns.of(step), 1).values()) == {0}
    line.streamer.set_counts(np.array([a, b]), reasoning_tokens=np.array([2, 8], np.int32))
    later = line.step([b, a], [1], [2])
    assert [(extra.row, extra.counts) for extra in later.side.extras] == [(0, {"reasoning_tokens": 8})]
    assert OutputColumns.of(later).reasoning_tokens == [8, 2]
    assert OutputColumns.of(step).reasoning_tokens == [2, 0]  # a step says what was so then
    assert line.step([a, b], [1], [2]).frame.side is None
    assert OutputColumns.of(line.step([a, b], [1], [2])).reasoning_tokens == [2, 8]


def test_counts_and_details_survive_a_retraction_and_a_new_stream(line):
    line = line()
    request = Request("r", cached_tokens=9)
    (handle,) = line.streamer.admit([request]).tolist()
    line.streamer.set_counts(np.array([handle]), image_tokens=np.array([4]))
    details = cached_tokens_details(9, device=4, storage=5, storage_backend="Disk")
    line.streamer.attach(handle, cached_tokens_details=details)
    line.step([handle], [1])
    (handle,) = line.streamer.admit([request], [line.streamer.retract(handle)]).tolist()
    line.streamer.set_counts(np.array([handle]), retraction_counts=np.array([1]))
    columns = line.columns([handle], [2])
    assert (columns.image_tokens, columns.retraction_counts, columns.cached_tokens) == ([4], [1], [9])
    assert columns.cached_tokens_details == [details]
    line.streamer.reopen()
    columns = line.columns([handle], [3])
    assert (columns.image_tokens, columns.retraction_counts, columns.cached_tokens_details) == ([4], [1], [details])


def test_details_and_time_stats_are_the_newest(line):
    line = line()
    (handle,) = line.streamer.admit([Request("r")]).tolist()
    assert line.columns([handle], [1]).time_stats == [None]
    for stats, total in ((b"old", 1), (b"new", 2)):
        line.streamer.attach(handle, time_stats=stats, cached_tokens_details=cached_tokens_details(total))
    columns = line.columns([handle], [2])
    assert (columns.time_stats, columns.cached_tokens_details) == ([b"new"], [{"device": 2, "host": 0}])
    line.streamer.attach(handle, cached_tokens_details=cached_tokens_details(2))
    step = line.step([handle], [3])
    assert [extra.cached_tokens_details for extra in step.side.extras] == []
    assert OutputColumns.of(step).time_stats == [b"new"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"total": 0}, None),
        ({"total": 7}, {"device": 7, "host": 0}),
        ({"total": 7, "storage_backend": "Disk"}, {"device": 7, "host": 0}),
        ({"total": 7, "device": 3, "host": 4}, {"device": 3, "host": 4}),
        ({"total": 0, "host": 4}, {"device": 0, "host": 4}),
        ({"total": 7, "device": 3, "storage": 4}, {"device": 3, "host": 0, "storage": 4}),
        (
            {"total": 3, "device": 3, "storage_backend": "none"},
            {"device": 3, "host": 0, "storage": 0, "storage_backend": "none"},
        ),
        (
            {"total": 9, "storage": 9, "storage_backend": "Disk"},
            {"device": 0, "host": 0, "storage": 9, "storage_backend": "Disk"},
        ),
    ],
)
def test_cached_tokens_details(arguments, expected):
    assert cached_tokens_details(**arguments) == expected


# --- What it costs ------------------------------------------------------------------------------------


def test_rows_without_extras_cost_no_bytes_and_no_look_at_their_slots(line, monkeypatch):
    line = line()
    has, *others = line.streamer.admit([Request("has"), *(Request(f"o{i}") for i in range(4))]).tolist()
    line.step([has, *others], *[[1]] * 5)
    plain = line.put(others, *[[1]] * 4)
    line.receive()
    line.streamer.attach(has, time_stats=b"t" * 100)
    looked = []
    take = HostColumns.take
    monkeypatch.setattr(HostColumns, "take", lambda *a, **k: looked.append(taken := take(*a, **k)) or taken)
    assert line.put(others, *[[1]] * 4) == plain
    assert looked == [{}]
    line.receive()
    assert line.step([has], [1]).side.extras[0].time_stats == b"t" * 100
    assert line.put(others, *[[1]] * 4) == plain
    assert [set(taken) for taken in looked] == [set(), {0}]  # nothing waits any more: nothing was asked
    line.receive()


def test_bytes_per_row_do_not_grow_with_the_output(line):
    line = line()
    request = Request("r", return_hidden_states=True, return_logprob=True)
    (handle,) = line.streamer.admit([request]).tolist()
    sizes = {}
    for token in range(16_000):
        line.streamer.attach(
            handle, hidden_states=[np.zeros(4, np.float16)], customized_info={"p": [7]}, time_stats=b"0123"
        )
        line.streamer.set_counts(np.array([handle]), reasoning_tokens=np.array([20_000 + token]))
        sizes[token + 1] = line.put([handle], [1], logprobs=scores([-1]))
        assert len(line.receive().deltas()[0].extras.hidden_states) == 1
    assert sizes[16_000] == sizes[100]


# --- What is refused ----------------------------------------------------------------------------------


BAD = {
    "input_logprobs: expected a request with return_logprob": {"input_logprobs": InputLogprobs()},
    "hidden_states: expected a request with return_hidden_states": {"hidden_states": [[1.0]]},
    "routed_experts: expected a request with return_routed_experts": {"routed_experts": np.zeros(1)},
    "indexer_topk: expected a request with return_indexer_topk": {"indexer_topk": np.zeros(1)},
    "customized_info: expected keys that are strings": {"customized_info": {3: [1]}},
    "customized_info.'p'.: expected a value that msgpack can carry": {"customized_info": {"p": [object()]}},
    "time_stats: expected bytes, got str": {"time_stats": "text"},
    "cached_tokens_details: expected names with counts or texts": {"cached_tokens_details": {"device": [1]}},
}


@pytest.mark.parametrize("message", BAD)
def test_what_a_request_did_not_ask_for_or_cannot_travel_is_refused(line, message):
    line = line()
    (handle,) = line.streamer.admit([Request("r")]).tolist()
    with pytest.raises(InputError, match=message):
        line.streamer.attach(handle, **{"time_stats": b"not taken"} | BAD[message])
    assert line.columns([handle], [1]).time_stats == [None]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_states", ["text"], "hidden_states: expected arrays, lists or numbers, got str"),
        ("hidden_states", [np.zeros(2, np.complex64)], "array: expected one of bool"),
        ("routed_experts", [[1]], "array: expected a NumPy array or a torch tensor, got list"),
        ("input_logprobs", {"token_logprobs_val": [1.0]}, "as many values as ids, got 1 and -1"),
        ("input_logprobs", {"token_logprobs_val": "text"}, "input_logprobs: expected InputLogprobs, got"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(line, name, value, message):
    line = line()
    request = Request("r", return_logprob=True, return_hidden_states=True, return_routed_experts=True)
    (handle,) = line.streamer.admit([request]).tolist()
    with pytest.raises(InputError, match=message):
        line.streamer.attach(handle, **{name: value})
    assert line.step([handle], [1], logprobs=scores([0])).side.extras == []


def test_a_value_nested_deeper_than_the_receiver_reads_is_refused(line):
    line = line()
    (handle,) = line.streamer.admit([Request("r")]).tolist()
    value: list = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(InputError, match="expected a value that msgpack can carry"):
        line.streamer.attach(handle, customized_info={"p": [value]})


def test_counts_out_of_range_or_unknown_are_refused(line):
    line = line()
    handles = line.streamer.admit([Request("r"), Request("s")])
    for counts_, message in (
        ({"reasoning_tokens": np.array([1, -1])}, "reasoning_tokens: expected 0 to"),
        ({"reasoning_tokens": np.array([1])}, "reasoning_tokens: expected 2 rows"),
        ({"image_tokens": np.array([1, 2]), "audio_tokens": np.array([1.5, 2])}, "audio_tokens: expected dtype"),
        ({"tokens": np.array([1, 2])}, "set_counts: expected cached_tokens"),
    ):
        with pytest.raises(InputError, match=message):
            line.streamer.set_counts(handles, **counts_)
    line.streamer.retire(handles[1:])
    with pytest.raises(HandleError, match="is not live"):
        line.streamer.set_counts(handles, image_tokens=np.array([1, 2]))
    with pytest.raises(HandleError, match="is not live"):
        line.streamer.attach(int(handles[1]), time_stats=b"")
    assert OutputColumns.of(line.step(handles[:1], [1])).image_tokens == [0]
