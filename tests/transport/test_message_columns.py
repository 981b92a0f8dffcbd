"""OutputColumns: every column of SPEC.md section 3 with a value of its own, and the ids of logprobs."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from frames import Row, Step, frame_of
from output_line import lines, scores

from gpupack.core import layout as L
from gpupack.core.config import EmitPolicy
from gpupack.core.request import Request
from gpupack.core.row_control import Control
from gpupack.streamer.cached_tokens import cached_tokens_details
from gpupack.transport.message_columns import OutputColumns
from gpupack.transport.score_ids import ScoreIds
from gpupack.wire.metadata import Array, InputLogprobs

line = lines  # a fixture
INPUT = InputLogprobs(
    token_logprobs_val=[None, -0.5],
    token_logprobs_idx=[11, 12],
    top_logprobs_val=[None, [-0.25]],
    top_logprobs_idx=[None, [13]],
    token_ids_logprobs_val=[None, [-3.0]],
    token_ids_logprobs_idx=[None, [14]],
)
ROUTED = torch.arange(8, dtype=torch.uint8).reshape(2, 2, 2)
INDEXER = np.arange(4, dtype=np.int64).reshape(2, 1, 2)

# A request that has a value in every column, and one that has none, worked by hand.
EXPECTED = {
    "rids": ["all", "none"],
    "http_worker_ipcs": ["ipc://w", None],
    "finished_reasons": [{"type": "length", "length": 3}, None],
    "decoded_texts": ["so far", ""],
    "decode_ids": [[2, 3, 4, 5, 6, 21, 22, 23], [9, 31]],
    "read_offsets": [5, 1],
    "output_ids": [[21, 22, 23], [31]],
    "skip_special_tokens": [False, True],
    "spaces_between_special_tokens": [False, True],
    "no_stop_trim": [True, False],
    "prompt_tokens": [6, 1],
    "reasoning_tokens": [2, 0],
    "completion_tokens": [3, 1],
    "cached_tokens": [5, 0],
    "cached_tokens_details": [{"device": 2, "host": 1, "storage": 2, "storage_backend": "Disk"}, None],
    "image_tokens": [101, 0],
    "audio_tokens": [102, 0],
    "video_tokens": [103, 0],
    "retraction_counts": [1, 0],
    "time_stats": [b"times", None],
    "spec_verify_ct": [1, 1],
    "spec_num_correct_drafts": [3, 0],
    "spec_num_block_accept_tokens": [6, 0],
    "spec_num_cap_tokens": [5, 2],
    "spec_correct_drafts_histogram": [[0, 0, 0, 1], [1]],
    "spec_cap_lens_histogram": [[0, 0, 0, 0, 0, 1], [0, 0, 1]],
    "input_token_logprobs_val": [[None, -0.5], []],
    "input_token_logprobs_idx": [[11, 12], []],
    "input_top_logprobs_val": [[None, [-0.25]], []],
    "input_top_logprobs_idx": [[None, [13]], []],
    "input_token_ids_logprobs_val": [[None, [-3.0]], []],
    "input_token_ids_logprobs_idx": [[None, [14]], []],
    "output_token_logprobs_val": [[-1.0, -2.0, -3.0], []],
    "output_token_logprobs_idx": [[21, 22, 23], []],
    "output_top_logprobs_val": [[[-1.0, -1.5], [-2.0, -2.5], [-3.0, -3.5]], []],
    "output_top_logprobs_idx": [[[21, 41], [22, 42], [23, 43]], []],
    "output_token_ids_logprobs_val": [[[-7.0], [-8.0], [-9.0]], []],
    "output_token_ids_logprobs_idx": [[[77], [77], [77]], []],
    "output_hidden_states": [[[0.5], [1.5], [2.5]], None],
    "routed_experts": [Array.of(ROUTED), None],
    "indexer_topk": [Array.of(INDEXER), None],
    "customized_info": {"key": [["x", 1, None], [None]]},
    "dp_ranks": [3, 3],
}


def test_every_column_carries_a_value_of_its_own(line):
    line = line(max_top_logprobs=4, max_token_ids_logprobs=2, speculative=True, dp_rank=3)
    requests = [
        Request(
            "all", [1, 2, 3, 4, 5, 6], max_new_tokens=3, return_logprob=True, top_logprobs_num=2,
            token_ids_logprob=[77], return_hidden_states=True, return_routed_experts=True, return_indexer_topk=True,
            http_worker_ipc="ipc://w", decoded_text="so far", cached_tokens=1, skip_special_tokens=False,
            spaces_between_special_tokens=False, no_stop_trim=True,
        ),
        Request("none", [9]),
    ]  # fmt: skip
    handles = line.streamer.admit(requests)
    line.streamer.set_counts(
        handles[:1],
        **{
            name: np.array([EXPECTED[name][0]])
            for name in ("cached_tokens", "reasoning_tokens", "retraction_counts", "image_tokens", "audio_tokens",
                         "video_tokens")
        },
    )  # fmt: skip
    line.streamer.attach(
        int(handles[0]),
        input_logprobs=INPUT,
        hidden_states=[[0.5], [1.5], np.array([2.5]), [3.5]],
        routed_experts=ROUTED,
        indexer_topk=INDEXER,
        customized_info={"key": ["x", 1, None, "behind the end"]},
        time_stats=b"times",
        cached_tokens_details=cached_tokens_details(5, 2, 1, 2, storage_backend="Disk"),
    )
    step = np.arange(1, 5, dtype=np.float32)
    top = np.full((2, 4, 4), np.nan, np.float32)
    top[0, :, 0], top[0, :, 1] = -step, -step - 0.5
    ids = np.zeros((2, 4, 4), np.int32)
    ids[0, :, 0], ids[0, :, 1] = np.arange(21, 25), np.arange(41, 45)
    columns = line.columns(
        handles,
        [21, 22, 23, 24],
        [31],
        logprobs=scores([-1, -2, -3, -4], [0]),
        top_logprobs_val=top,
        top_logprobs_idx=ids,
        token_ids_logprobs_val=np.stack([-6 - step, step])[:, :, None],
        block_accept_lens=np.array([6, 0], np.int32),
        cap_lens=np.array([5, 2], np.int32),
    )
    assert {field.name: getattr(columns, field.name) for field in fields(columns)} == EXPECTED
    for name, column in EXPECTED.items():
        if isinstance(column, list) and name not in ("dp_ranks", "spec_verify_ct"):
            assert column[0] != column[1], name


def test_columns_that_nobody_asked_for_are_absent_or_empty(line):
    line = line()
    handles = line.streamer.admit([Request("r")])
    columns = line.columns(handles, [1], return_logprob=False)
    absent = {field.name for field in fields(columns) if getattr(columns, field.name) is None}
    assert absent == {
        name for name in EXPECTED
        if "logprobs" in name or name in ("output_hidden_states", "routed_experts", "indexer_topk", "customized_info")
    }  # fmt: skip
    assert {getattr(columns, name) == [] for name in EXPECTED if name.startswith("spec_")} == {True}


def test_decode_ids_have_the_prompt_once(line):
    line = line()
    request = Request("r", [1, 2, 3, 4, 5, 6])
    (handle,) = line.streamer.admit([request]).tolist()
    columns = line.columns([handle], [7])
    assert (columns.decode_ids, columns.read_offsets) == ([[2, 3, 4, 5, 6, 7]], [5])
    columns = line.columns([handle], [8])
    assert (columns.decode_ids, columns.read_offsets) == ([[8]], [5])
    (handle,) = line.streamer.admit([request], [line.streamer.retract(handle)]).tolist()
    columns = line.columns([handle], [9])
    assert (columns.decode_ids, columns.read_offsets) == ([[9]], [5])
    (handle,) = line.streamer.admit([request], [line.streamer.retract(handle).dropped()]).tolist()
    assert line.columns([handle], [10]).decode_ids == [[2, 3, 4, 5, 6, 10]]


def test_counters_of_speculative_decoding_are_totals(line):
    line = line(speculative=True, max_accept=4)
    (handle,) = line.streamer.admit([Request("r")]).tolist()
    line.step([handle], [1, 2, 3])
    line.step([handle], [4])
    columns = line.columns([handle], [5, 6, 7], cap_lens=np.array([4]), block_accept_lens=np.array([2]))
    assert (columns.spec_verify_ct, columns.spec_num_correct_drafts) == ([3], [4])
    assert columns.spec_correct_drafts_histogram == [[1, 0, 2]]
    assert (columns.spec_num_cap_tokens, columns.spec_cap_lens_histogram) == ([4], [[0, 0, 0, 0, 1]])
    assert columns.spec_num_block_accept_tokens == [2]


# --- Ids of logprobs ----------------------------------------------------------------------------------


def ids(columns: OutputColumns) -> list:
    assert columns.output_token_logprobs_idx is not None
    assert [*map(len, columns.output_token_logprobs_idx)] == [*map(len, columns.output_token_logprobs_val)]
    return columns.output_token_logprobs_idx


def test_a_backlog_of_logprobs_has_the_ids_of_tokens_that_went_before(line):
    line = line(window=256)
    a, b = line.streamer.admit([Request("a", return_logprob=True), Request("b", return_logprob=True)]).tolist()
    assert ids(line.columns([a, b], [1], [2], logprobs=scores([0], [0]))) == [[1], [2]]
    for token in (3, 4):
        step = line.step([a, b], [token], [50 + token], logprobs=scores([0], [0]), return_logprob=False)
        assert [delta.logprob_ids for delta in step.deltas()] == [None, None]
    assert ids(line.columns([b, a], [57, 58], [5], logprobs=scores([0, 0], [0, 0]))) == [[53, 54, 57, 58], [3, 4, 5]]
    assert ids(line.columns([a], [6], logprobs=scores([0]))) == [[6]]


def test_ids_of_a_backlog_go_with_a_retracted_request(line):
    line = line()
    request = Request("r", return_logprob=True)
    (handle,) = line.streamer.admit([request]).tolist()
    for token in (1, 2):
        line.step([handle], [token], logprobs=scores([0]), return_logprob=False)
    (handle,) = line.streamer.admit([request], [line.streamer.retract(handle)]).tolist()
    assert ids(line.columns([handle], [3], logprobs=scores([0]))) == [[1, 2, 3]]
    line.step([handle], [4], logprobs=scores([0]), return_logprob=False)
    (handle,) = line.streamer.admit([request], [line.streamer.retract(handle).dropped()]).tolist()
    assert ids(line.columns([handle], [5], logprobs=scores([0]))) == [[5]]


def test_ids_of_an_output_that_was_cut_behind_what_was_sent(line):
    line = line()
    handles = line.streamer.admit([Request("r", judge="engine", return_logprob=True)])
    line.step(handles, [1, 2, 3], logprobs=scores([-1, -2, -3]), return_logprob=False)
    control = Control(1).reset(1)
    control.finish(0, L.FINISH_STOP_TOKEN, finished_len=2, match=2)
    line.streamer.stream_output(handles, True, control=control)
    columns = OutputColumns.of(line.receive())
    assert (columns.output_ids, columns.completion_tokens) == ([[]], [2])
    assert (ids(columns), columns.output_token_logprobs_val) == ([[1, 2]], [[-1.0, -2.0]])


def test_ids_that_do_not_lead_up_to_a_row_are_not_taken_for_others():
    """What no sender of ours does: a logprob is left out, later ones go, and then come more than there can be."""
    known = ScoreIds()

    def note(tokens: list[int], before: int, logprobs: list[float]) -> dict:
        step = Step([Row(0, 1, tokens, before + len(tokens), logprobs=logprobs)], has_logprobs=True)
        return known.note(frame_of(step), np.array([0]), ["r"], [before])

    assert note([7], 0, []) == {}
    assert note([9], 2, [-1.0, -2.0, -3.0]) == {0: [None, None, 9]}


def test_ids_that_went_to_another_receiver_are_not_known(line):
    line = line()
    (handle,) = line.streamer.admit([Request("r", return_logprob=True)]).tolist()
    line.step([handle], [1], logprobs=scores([0]), return_logprob=False)
    line.streamer.reopen()
    assert ids(line.columns([handle], [2], logprobs=scores([0]))) == [[None, 2]]


def test_what_a_dropped_request_left_means_nothing_to_another_of_its_name(line):
    line = line()
    (handle,) = line.streamer.admit([Request("r", return_logprob=True)]).tolist()
    line.step([handle], [1], logprobs=scores([0]), return_logprob=False)
    line.streamer.retire(np.array([handle]))
    (handle,) = line.streamer.admit([Request("r", return_logprob=True)]).tolist()
    line.step([handle], [2], logprobs=scores([0]), return_logprob=False)
    assert ids(line.columns([handle], [3], logprobs=scores([0]))) == [[2, 3]]


@pytest.mark.parametrize("policy", [EmitPolicy(), EmitPolicy.sglang_0_5_16()])
def test_a_scoring_request_has_the_id_of_its_one_logprob(line, policy):
    line = line(policy=policy)
    request = Request("r", [4, 5], max_new_tokens=0, return_logprob=True)
    handles = line.streamer.admit([request, Request("other")])
    step = line.step(handles, [6], [7], logprobs=scores([-1], [0]))
    (delta, other), columns = step.deltas(), OutputColumns.of(step)
    assert (delta.token_ids, delta.completion_tokens, delta.logprobs) == ([], 0, [-1.0])
    assert delta.finish_reason == {"type": "length", "length": 0}
    assert (ids(columns), columns.output_ids, columns.decode_ids) == ([[6], []], [[], [7]], [[4, 5], [7]])
    assert other.token_ids == [7]
