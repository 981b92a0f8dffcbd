"""Host columns through a real socket: what goes with which row, once, newest or per token (SPEC.md section 3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from output_line import lines, scores

from gpupack.core import layout as L
from gpupack.core.request import Request
from gpupack.core.row_control import Control
from gpupack.transport.message_columns import OutputColumns
from gpupack.wire.metadata import Array, InputLogprobs

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


def test_a_column_is_there_if_nobody_knows_who_is_in_the_batch(line):
    line = line()
    asks, other = line.streamer.admit([Request("asks", return_hidden_states=True), Request("other")]).tolist()
    line.streamer.attach(asks, hidden_states=[state(1)])
    for runs, expected in (([[1], [2]], [[state(1)], None]), ([[3]], [None])):
        handles = np.array([asks, other][-len(runs) :])
        ticket = line.packer.step(handles, np.array(runs))
        ticket.handles = None  # as of handles on the device
        line.streamer.send(ticket)
        assert OutputColumns.of(line.receive()).output_hidden_states == expected
    line.streamer.retire(np.array([asks]))
    assert line.columns([other], [4]).output_hidden_states is None


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
