"""Host columns that change seldom, what they cost, and what is refused, through a real socket (SPEC.md section 3)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from output_line import lines, scores

from gpupack.core.errors import HandleError, InputError
from gpupack.core.request import Request
from gpupack.streamer.cached_tokens import cached_tokens_details
from gpupack.streamer.host_columns import HostColumns
from gpupack.transport.message_columns import OutputColumns
from gpupack.wire.metadata import Array, InputLogprobs

line = lines  # a fixture

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
    line = line(max_top_logprobs=2, max_token_ids_logprobs=1, speculative=True)
    request = Request(
        "r", return_hidden_states=True, return_logprob=True, top_logprobs_num=2, token_ids_logprob=[9],
    )  # fmt: skip
    families = {
        "top_logprobs_val": np.zeros((1, 2), np.float32),
        "top_logprobs_idx": np.array([[4, 5]]),
        "token_ids_logprobs_val": np.zeros((1, 1), np.float32),
    }
    (handle,) = line.streamer.admit([request]).tolist()
    sizes = {}
    for token in range(16_000):
        line.streamer.attach(
            handle, hidden_states=[np.zeros(4, np.float16)], customized_info={"p": [7]}, time_stats=b"0123"
        )
        line.streamer.set_counts(np.array([handle]), reasoning_tokens=np.array([20_000 + token]))
        sizes[token + 1] = line.put([handle], [1], logprobs=scores([-1]), cap_lens=np.array([3]), **families)
        (delta,) = line.receive().deltas()
        assert len(delta.extras.hidden_states) == len(delta.top_logprobs_idx) == 1
    assert sizes[16_000] == sizes[100]


# --- What is refused ----------------------------------------------------------------------------------


BAD = {
    "input_logprobs: expected a request with return_logprob": {"input_logprobs": InputLogprobs()},
    "hidden_states: expected a request with return_hidden_states": {"hidden_states": [[1.0]]},
    "routed_experts: expected a request with return_routed_experts": {"routed_experts": np.zeros(1)},
    "indexer_topk: expected a request with return_indexer_topk": {"indexer_topk": np.zeros(1)},
    "customized_info: expected keys that are strings": {"customized_info": {3: [1]}},
    "customized_info.'p'.: expected a value that msgpack can carry": {"customized_info": {"p": [object()]}},
    "customized_info.'p'.: .* got a msgpack extension of code 5": {
        "customized_info": {"p": [msgspec.msgpack.Ext(5, b"x")]}
    },
    "customized_info.'p'.: .* got one that it cannot: MessagePack": {"customized_info": {"p": [msgspec.Raw(b"\xc1")]}},
    "customized_info.'p'.: .* got one that it cannot: Input data was truncated": {
        "customized_info": {"p": [msgspec.Raw(b"")]}
    },
    "customized_info.'p'.: .* expected a tensor on the CPU, got one on meta": {
        "customized_info": {"p": [{"deep": [torch.zeros(2, device="meta")]}]}
    },
    "time_stats: expected bytes, got str": {"time_stats": "text"},
    "time_stats: expected at most 1048576 bytes, got 1048577": {"time_stats": bytes(2**20 + 1)},
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
        ("hidden_states", [True], "hidden_states: expected arrays, lists or numbers, got bool"),
        ("hidden_states", [[msgspec.msgpack.Ext(5, b"x")]], "hidden_states: .* got a msgpack extension of code 5"),
        ("hidden_states", [[torch.zeros(2, device="meta")]], "hidden_states: expected .* CPU, got one on meta"),
        ("hidden_states", [Array("int8", [2], b"")], "hidden_states: expected 2 bytes for int8 .2., got 0"),
        ("routed_experts", Array("int8", [-1, -1], b"0"), "routed_experts: expected an array, got"),
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


def test_the_prompt_may_count_otherwise_than_its_ids(line):
    line = line()
    handles = line.streamer.admit([Request("a", prompt_ids=[1, 2, 3], prompt_tokens=577), Request("b", prompt_ids=[4])])
    columns = OutputColumns.of(line.step(handles, [5], [6]))
    assert columns.prompt_tokens == [577, 1]
    assert columns.decode_ids == [[1, 2, 3, 5], [4, 6]]
    with pytest.raises(InputError, match="prompt_tokens of c: expected an integer from 0"):
        Request("c", prompt_tokens=-1)


def test_a_prefill_step_of_a_speculative_engine_counts_nothing(line):
    line = line(speculative=True, max_accept=4)
    handles = line.streamer.admit([Request("a"), Request("b")])
    assert OutputColumns.of(line.step(handles, [5], [], verify=False)).spec_verify_ct == [0]
    assert OutputColumns.of(line.step(handles, [5, 6], [7])).spec_verify_ct == [1, 1]


def test_handles_that_were_never_given_are_refused(line):
    line = line()
    line.streamer.admit([Request("r")])
    for handle in ((1 << 32) | 3, (1 << 32) | 99, -1):
        with pytest.raises(HandleError, match="is not live"):
            line.streamer.attach(handle, time_stats=b"x")
        with pytest.raises(HandleError, match="is not live"):
            line.streamer.set_counts(np.array([handle]), image_tokens=np.array([1]))


def test_what_ends_before_its_row_leaves_nothing_waiting(line):
    line = line()
    a, b, c = line.streamer.admit([Request(name) for name in "abc"]).tolist()
    line.streamer.attach(a, time_stats=b"x")
    line.streamer.set_counts(np.array([b, c]), image_tokens=np.array([1, 2]))
    columns = line.streamer._columns
    line.streamer.retire(np.array([a, b]))
    assert columns.waiting
    line.streamer.retire(np.array([c]))
    assert not columns.waiting


def test_a_reason_with_numbers_of_more_than_64_bits_is_refused(line):
    line = line()
    handles = line.streamer.admit([Request("a"), Request("b")])
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(InputError, match="reason: expected"):
            line.streamer.abort(handles, {"type": "abort", "code": number})
    reason = {"type": "abort", "most": 2**64 - 1, "least": -(2**63)}
    line.streamer.send(line.streamer.abort(handles, reason))
    assert [delta.finish_reason for delta in line.receive().deltas()] == [reason, reason]


def test_names_longer_than_the_wire_takes_are_refused():
    longest = Request("r" * 4096, http_worker_ipc="w" * 4096)
    assert len(longest.rid) == 4096
    with pytest.raises(InputError, match="rid: expected at most 4096 characters, got 4097"):
        Request("r" * 4097)
    with pytest.raises(InputError, match="http_worker_ipc: expected at most 4096 characters, got 4097"):
        Request("r", http_worker_ipc="w" * 4097)
