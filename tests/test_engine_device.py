"""Parts of the plugin's device backend that need no SGLang: inputs, handles, backlog, and what goes wrong."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupack import Packer, PackerConfig
from gpupack.core import layout as L
from gpupack.sglang import emit_rule as C
from gpupack.sglang.batch import Batch
from gpupack.sglang.column_lists import logprob_lists, token_lists
from gpupack.sglang.device.backend import ELSEWHERE, FAILED, OUTSIDE, DeviceBackend
from gpupack.sglang.device.backlog import RECORD_WINDOW, WINDOW, Backlog
from gpupack.sglang.device.hooks import around_copying, around_process, around_relay, around_settled
from gpupack.sglang.device.pool_handles import PoolHandles, UnsupportedByDevice
from gpupack.sglang.device.tensors import copy_top_logprobs, step_inputs, unsplit
from gpupack.sglang.request_states import RequestStates
from gpupack.sglang.stats import Stats

SLOTS = 8


class Req:
    """A request with what the device side looks at."""

    def __init__(self, rid="r", scores=False, top=0, ids=None):
        self.rid, self.http_worker_ipc, self.decoded_text, self.stream = rid, None, "", True
        self.return_logprob = scores
        self.logprob = SimpleNamespace(top_logprobs_num=top, token_ids_logprob=ids)
        self.sampling_params = SimpleNamespace(
            stop_strs=[], stream_interval=None, skip_special_tokens=True, spaces_between_special_tokens=True,
            no_stop_trim=False,
        )  # fmt: skip
        self.output_ids, self.origin_input_ids_unpadded = array("q"), array("q", [1, 2])
        self.finished_reason = self.finished_len = self.input_embeds = None
        self.finished_output = self.is_retracted = self.input_logprob_sent = False
        self.retraction_count, self.reasoning_tokens, self.customized_info = 0, 0, None
        self.return_hidden_states = self.return_routed_experts = self.return_indexer_topk = False
        self.send_token_offset = self.send_output_token_logprobs_offset = self.send_decode_id_offset = 0


def result_of(ids, **values):
    """A result of the engine."""
    names = ("accept_lens", "speculative_output_stride", "speculative_num_draft_tokens")
    output = SimpleNamespace(
        next_token_logprobs=values.pop("logprobs", None),
        next_token_top_logprobs_val=values.pop("top_val", None),
        next_token_top_logprobs_idx=values.pop("top_idx", None),
    )
    return SimpleNamespace(next_token_ids=ids, logits_output=output, **{name: values.get(name) for name in names})


def split(whole, widths):
    """The views that the engine makes of the top logprobs of a batch."""
    return [whole[i][:width] for i, width in enumerate(widths)]


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [[3], [3, 0, 1], [0, 0, 3, 2], [1, 3, 0]])
def test_views_of_rows_are_seen_as_the_tensor_that_they_are_of(widths):
    whole = torch.randn(len(widths), 3).topk(3).values
    found = unsplit(split(whole, widths))
    assert found is not None
    assert torch.equal(found, whole)
    assert found.data_ptr() == whole.data_ptr()


@pytest.mark.parametrize(
    "views",
    [
        None,
        [],
        [torch.zeros(2), torch.zeros(2)],
        [torch.zeros(3), torch.zeros(2)],
        list(torch.zeros(3, 2)[1:]),
        list(torch.zeros(2, 3).flip(0))[::-1],
        [[1.0, 2.0]],
        [torch.zeros(0), torch.zeros(0)],
    ],
    ids=["none", "empty", "apart", "apart, of several lengths", "a part", "another order", "lists", "nothing in them"],
)
def test_what_is_no_tensor_of_a_batch_is_left_alone(views):
    assert unsplit(views) is None


def test_top_logprobs_are_copied_in_two_pieces():
    values, ids = torch.randn(4, 5).topk(3)
    widths = [3, 0, 2, 1]
    copied = []
    output = result_of(None, top_val=split(values, widths), top_idx=split(ids, widths)).logits_output
    rows = copy_top_logprobs(output, lambda tensor: copied.append(tensor) or tensor.clone())
    assert len(copied) == 2
    for got, expected in zip(rows, (values, ids), strict=True):
        assert [row.tolist() for row in got] == [row[:k].tolist() for row, k in zip(expected, widths, strict=True)]
    assert copy_top_logprobs(None, None) is None
    assert copy_top_logprobs(result_of(None).logits_output, None) is None


def test_ids_and_logprobs_of_a_verify_step_have_strides_of_their_own():
    lens, logprobs = torch.tensor([2, 1]), torch.randn(2, 3)
    values, ids = torch.randn(6, 9).topk(2)
    result = result_of(
        torch.arange(8), accept_lens=lens, speculative_num_draft_tokens=4, logprobs=logprobs,
        top_val=split(values, [2] * 6), top_idx=split(ids, [2] * 6),
    )  # fmt: skip
    inputs = step_inputs(result, 2, True, 2)
    assert inputs["token_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert inputs["accept_lens"].dtype == torch.int32
    assert inputs["logprobs"].shape == (2, 3)
    assert inputs["top_logprobs_val"].shape == inputs["top_logprobs_idx"].shape == (2, 3, 2)
    assert set(step_inputs(result, 2, False, 0)) == {"token_ids", "accept_lens"}
    result.speculative_output_stride = 5
    with pytest.raises(UnsupportedByDevice, match="unknown shape"):
        step_inputs(result, 2, False, 0)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (result_of([1, 2]), "no sampled ids"),
        (result_of(torch.arange(4)), "unknown shape"),
        (result_of(torch.arange(2)), "logprobs that are no tensor"),
        (result_of(torch.arange(2), logprobs=torch.zeros(3)), "logprobs that are no tensor"),
        (result_of(torch.arange(2), logprobs=torch.zeros(2)), "top logprobs that are no tensor"),
    ],
)
def test_what_is_not_there_is_said(result, why):
    with pytest.raises(UnsupportedByDevice, match=why):
        step_inputs(result, 2, True, 1)


# --- handles --------------------------------------------------------------------------------------


def small_packer(accept=1):
    window = 1 << accept.bit_length()
    config = PackerConfig(
        1000, capacity=SLOTS, max_accept=accept, window=window, family_window=window, max_top_logprobs=3,
        max_in_flight=4,
    )  # fmt: skip
    return Packer(config)


def test_a_handle_is_index_and_generation_and_ends_when_the_index_is_given_again():
    packer, generations = small_packer(), np.zeros(SLOTS, np.int64)
    handles = PoolHandles(packer, generations)
    generations[[3, 5]] = 1, 7
    indices = np.array([5, 3])
    owners = handles.of([Req(), Req(scores=True, top=2)], indices)
    assert owners.tolist() == [7 << 32 | 5, 1 << 32 | 3]
    assert handles.asked(indices) == (True, 2)
    assert handles.asked(indices[:1]) == (False, 0)

    top = {"top_logprobs_val": np.zeros((2, 3), np.float32), "top_logprobs_idx": np.zeros((2, 3), np.int64)}
    ticket = packer.append(owners, np.array([11, 12]), logprobs=np.zeros(2, np.float32), **top)
    generations[5] += 1  # retracted, and the index given to another one while the step is in flight
    again = handles.of([Req()], indices[:1])
    packed = ticket.wait()
    assert packed.column(L.R_SLOT).tolist() == [3]
    assert packed.column(L.R_BATCH_INDEX).tolist() == [1]
    packed.release()
    packed = packer.append(again, np.array([13])).wait()
    assert packed.token_ids.tolist() == [13]


@pytest.mark.parametrize(
    ("req", "why"),
    [(Req(scores=True, ids=[4]), "token-ids logprobs"), (Req(scores=True, top=21), "more than 20 top logprobs")],
)
def test_a_request_that_cannot_be_packed_is_named_until_its_index_is_given_again(req, why):
    generations = np.ones(SLOTS, np.int64)
    handles = PoolHandles(small_packer(), generations)
    indices = np.array([1, 2])
    for _ in range(2):
        with pytest.raises(UnsupportedByDevice, match=why):
            handles.of([Req(), req], indices)
    generations[2] += 1
    assert len(handles.of([Req(), Req()], indices)) == 2


# --- backlog --------------------------------------------------------------------------------------

STEP = st.tuples(
    st.lists(st.integers(0, 3), min_size=3, max_size=3),  # accepted
    st.lists(st.integers(0, 3), min_size=3, max_size=3),  # of which the engine discards
    st.booleans(),  # packed
    st.lists(st.booleans(), min_size=3, max_size=3),  # sends
)


@settings(deadline=None)
@given(steps=st.lists(STEP, max_size=30), seed=st.integers(0, 99))
def test_the_backlog_has_what_the_engine_committed_or_says_that_it_has_not(steps, seed):
    rng = np.random.default_rng(seed)
    packer, request_states = small_packer(3), RequestStates(2)
    reqs = [Req("a"), Req("b", scores=True), Req("c", scores=True, top=2)]
    handles = PoolHandles(packer, np.ones(SLOTS, np.int64)).of(reqs, np.arange(1, 4))
    backlog, said = Backlog(request_states), [[], [], []]
    sent, first = [0, 0, 0], [0, 0, 0]
    backlog.meet(request_states.membership_of(reqs))
    for accepts, discards, packs, sends in steps:
        ids = rng.integers(0, 99, (3, 3))
        scores = rng.standard_normal((3, 3), np.float32)
        top, idx = rng.standard_normal((3, 3, 3), np.float32), rng.integers(0, 99, (3, 3, 3))
        packed = packer.append(
            handles, ids, accept_lens=np.array(accepts, np.int32), logprobs=scores, top_logprobs_val=top,
            top_logprobs_idx=idx,
        ).wait()  # fmt: skip
        for i, req in enumerate(reqs):
            for j in range(max(accepts[i] - discards[i], 0)):
                req.output_ids.append(int(ids[i, j]))
                said[i].append((ids[i, j], scores[i, j], top[i, j, :2].tolist(), idx[i, j, :2].tolist()))
        batch = Batch(reqs, True, None, request_states)
        grown = [len(req.output_ids) for req in reqs]
        before = backlog._kept[batch.slots, 1].tolist()
        lost = backlog.take(batch.slots, batch.lens, packed if packs else None)
        assert lost == (0 if packs else sum(a != b for a, b in zip(grown, before, strict=True)))
        first = [n if not packs and n != b else f for n, b, f in zip(grown, before, first, strict=True)]
        first[2] = max(first[2], grown[2] - RECORD_WINDOW)
        packed.release()
        chosen = [i for i in range(3) if sends[i]]
        rows = np.zeros((C.ROW_WIDTH, len(chosen)), np.int32)
        for row, i in enumerate(chosen):
            scored = (sent[i], grown[i]) if reqs[i].return_logprob else (0, 0)
            rows[:, row] = i, batch.slots[i], sent[i], grown[i], *scored, 0
        items = backlog.items(batch, rows)
        assert (items is None) == any(first[i] > sent[i] < grown[i] for i in chosen)
        if items is not None and chosen:
            check(items, [reqs[i] for i in chosen], [said[i][sent[i] : grown[i]] for i in chosen])
        for i in chosen:
            sent[i] = grown[i]


def check(items, reqs, expected):
    assert [list(ids) for ids in token_lists(items.tokens)] == [[int(t[0]) for t in row] for row in expected]
    columns = logprob_lists(items, reqs)
    for req, row, *got in zip(reqs, expected, *columns.values(), strict=True):
        scores, ids, top, idx = got[:4]
        assert scores == ([float(t[1]) for t in row] if req.return_logprob else [])
        assert ids == ([int(t[0]) for t in row] if req.return_logprob else [])
        wanted = req.logprob.top_logprobs_num
        assert top == ([t[2] for t in row] if wanted else [])
        assert idx == ([t[3] for t in row] if wanted else [])
        assert got[4:] == [[], []]


@pytest.mark.parametrize(("top", "window"), [(0, WINDOW), (1, RECORD_WINDOW)])
def test_a_backlog_longer_than_its_window_is_not_given_in_part(top, window):
    packer, request_states = small_packer(), RequestStates(1)
    req = Req(scores=True, top=top)
    handle = PoolHandles(packer, np.ones(SLOTS, np.int64)).of([req], np.array([1]))
    backlog = Backlog(request_states)
    backlog.meet(request_states.membership_of([req]))
    one = {"logprobs": np.zeros(1, np.float32), "top_logprobs_val": np.zeros((1, 1), np.float32),
           "top_logprobs_idx": np.zeros((1, 1), np.int64)}  # fmt: skip
    for n in range(1, window + 2):
        packed = packer.append(handle, np.array([n]), **one).wait()
        req.output_ids.append(n)
        batch = Batch([req], True, None, request_states)
        backlog.take(batch.slots, batch.lens, packed)
        packed.release()
        rows = np.array([[0, batch.slots[0], 0, n, 0, n, 0]], np.int32).T.copy()
        items = backlog.items(batch, rows)
        assert (items is None) == (n > window)
        if items is not None:
            assert items.tokens.items.tolist() == list(range(1, n + 1))


# --- the backend ----------------------------------------------------------------------------------


class Engine:
    """A scheduler's part in it: one request, a token a step, each sent."""

    def __init__(self, sender=None, **scheduler):
        self.request_states, self.stats = RequestStates(1), Stats("test")
        self.req, self.sent = Req(), 0
        known = {
            "enable_async_d2h_copy": False,
            "disaggregation_mode": SimpleNamespace(name="NULL"),
            "device": "cpu",
            "spec_algorithm": SimpleNamespace(is_none=lambda: True),
            "model_config": SimpleNamespace(vocab_size=9),
            "req_to_token_pool": SimpleNamespace(req_generation=torch.ones(SLOTS, dtype=torch.int64)),
        }
        scheduler = SimpleNamespace(**known | scheduler)
        self.device = DeviceBackend(scheduler, sender or object(), self.request_states, self.stats)

    def launch(self, token=5, copied=True):
        batch = SimpleNamespace(reqs=[self.req], req_pool_indices_cpu=torch.tensor([2]))
        result = result_of(torch.tensor([token]))
        self.device.relayed(batch, result)
        if copied:
            self.device.copied(result.gpupack)
        return batch, result

    def process(self, batch, result):
        self.device.begin(batch, result)
        self.req.output_ids.append(int(result.next_token_ids[0]))
        return self.stream(batch.reqs)

    def stream(self, reqs):
        batch = Batch(reqs, False, None, self.request_states)
        end = len(self.req.output_ids)
        rows = np.array([[0, batch.slots[0], self.sent, end, 0, 0, 0]], np.int32).T.copy()
        items = self.device.items(batch, rows)
        self.sent = end
        self.device.end()
        return None if items is None else items.tokens.items.tolist()


def test_steps_in_flight_come_with_their_results():
    engine = Engine()
    steps = [engine.launch(token) for token in (5, 6)]
    assert [engine.process(*step) for step in steps] == [[5], [6]]
    assert engine.stream([engine.req]) == []  # outside of a step: a row with nothing new
    assert engine.stats.packed == 3


def test_results_that_are_dropped_are_left_out():
    engine = Engine()
    lost = [engine.launch(token) for token in (1, 2, 3, 4, 5)]
    assert engine.process(*engine.launch(6)) == [6]
    assert engine.process(*lost[-1]) is None  # out of order: it is not there any more
    assert engine.process(*engine.launch(7)) == [7]
    assert engine.stats.unpacked == {ELSEWHERE: 1}


def test_a_result_that_is_not_copied_is_made_of_lists():
    engine = Engine()
    assert engine.process(*engine.launch(5, copied=False)) is None
    assert engine.process(*engine.launch(6)) == [6]
    assert engine.stats.unpacked == {ELSEWHERE: 1}


def test_a_batch_that_the_streamer_is_not_called_with_is_taken_in():
    engine = Engine()
    engine.device.begin(*engine.launch(5))
    engine.device.end()
    assert engine.process(*engine.launch(6)) == [6]


def test_tokens_that_went_another_way_are_not_kept():
    engine = Engine()
    engine.req.output_ids.extend([1, 2])
    assert engine.stream([engine.req]) is None
    assert engine.process(*engine.launch(3)) == [3]
    engine.req.output_ids.append(4)
    engine.device.passed([engine.req], engine.request_states.slots_of([engine.req]))  # by the engine's own streamer
    engine.sent += 1
    assert engine.process(*engine.launch(5)) == [5]
    assert engine.stats.unpacked == {OUTSIDE: 1}


def test_a_replaced_id_is_the_engines():
    engine = Engine()
    batch, result = engine.launch(99)
    engine.device.begin(batch, result)
    engine.req.output_ids.append(2)  # in place of 99
    engine.req.finished_reason = "stop"
    assert engine.stream(batch.reqs) is None
    assert engine.stats.unpacked == {ELSEWHERE: 1}


def test_when_the_packer_fails_the_lists_go_on(caplog):
    engine = Engine()
    assert engine.process(*engine.launch(5)) == [5]
    step = engine.launch(6)
    engine.device._packer.close()
    assert engine.process(*step) is None
    assert engine.process(*engine.launch(7)) is None
    assert engine.process(*engine.launch(8)) is None
    assert engine.stats.unpacked == {ELSEWHERE: 1, FAILED: 2}
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "gpupack: the device backend failed; the host backend goes on"
    ]


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        ({"enable_async_d2h_copy": True}, "confidential computing"),
        ({"disaggregation_mode": SimpleNamespace(name="PREFILL")}, "disaggregation"),
        ({"device": "npu"}, "device npu"),
        ({"req_to_token_pool": object()}, "a pool without generations"),
        ({"sender": SimpleNamespace(socket=None)}, "a rank without a socket"),
    ],
)
def test_where_it_cannot_be_it_says_so(scheduler, why):
    engine = Engine(**scheduler)
    assert engine.process(*engine.launch(5)) is None
    assert engine.process(*engine.launch(6)) is None
    assert engine.stats.unpacked == {why: 2}


def test_a_packer_that_cannot_be_made_leaves_the_lists(caplog):
    engine = Engine(model_config=SimpleNamespace(vocab_size=0))
    assert engine.process(*engine.launch(5)) is None
    assert engine.stats.unpacked == {FAILED: 1}
    assert "the host backend goes on" in caplog.text


# --- hooks ----------------------------------------------------------------------------------------


def scheduler_of(engine, *, overlap):
    ours = SimpleNamespace(device=engine.device)
    return SimpleNamespace(enable_overlap=overlap, output_streamer=SimpleNamespace(gpupack=ours))


def batch_of(engine):
    return SimpleNamespace(reqs=[engine.req], req_pool_indices_cpu=torch.tensor([2]))


def test_with_overlap_a_step_is_enqueued_at_the_relay_and_committed_before_the_copy():
    engine = Engine()
    scheduler, result = scheduler_of(engine, overlap=True), result_of(torch.tensor([5]))
    assert around_relay(lambda *_: "relayed", scheduler, batch_of(engine), None, result) == "relayed"
    assert result.gpupack.ticket is None
    around_copying(lambda given: given.gpupack.ticket.ready(), None, result)
    assert engine.process(batch_of(engine), result) == [5]


def test_without_overlap_both_are_done_when_the_batch_is_settled():
    engine = Engine()
    scheduler, result = scheduler_of(engine, overlap=False), result_of(torch.tensor([5]))
    around_relay(lambda *_: None, scheduler, batch_of(engine), None, result)
    assert not hasattr(result, "gpupack")
    around_settled(lambda *_: None, scheduler, batch_of(engine), result)
    assert engine.process(batch_of(engine), result) == [5]


def test_the_engine_copies_nothing_of_top_logprobs_that_are_copied_whole():
    engine, copied = Engine(), []
    values, ids = torch.randn(2, 5).topk(3)
    result = result_of(torch.tensor([5]), top_val=split(values, [2, 3]), top_idx=split(ids, [2, 3]))
    engine.device.relayed(batch_of(engine), result)

    def original(given, return_logprob):
        assert return_logprob
        assert (
            given.logits_output.next_token_top_logprobs_val is given.logits_output.next_token_top_logprobs_idx is None
        )

    around_copying(original, lambda whole: copied.append(whole) or whole, result, return_logprob=True)
    assert len(copied) == 2
    assert [row.tolist() for row in result.logits_output.next_token_top_logprobs_val] == [
        values[0][:2].tolist(),
        values[1].tolist(),
    ]


def test_a_result_that_was_processed_is_forgotten_also_after_an_error():
    engine = Engine()
    scheduler, step = scheduler_of(engine, overlap=True), engine.launch(5)

    def original(*_):
        raise ValueError("in the engine")

    with pytest.raises(ValueError, match="in the engine"):
        around_process(original, scheduler, *step)
    assert engine.device._current is None
    assert around_process(lambda *given: given[1:], SimpleNamespace(), *step) == step


def test_a_scheduler_without_a_device_backend_is_left_alone():
    result = result_of(torch.tensor([5]))
    around_relay(lambda *_: None, SimpleNamespace(enable_overlap=True), None, None, result)
    around_settled(lambda *_: None, SimpleNamespace(output_streamer=SimpleNamespace()), None, result)
    assert around_copying(lambda *given, **options: (given, options), None, result, 1, a=2) == ((result, 1), {"a": 2})
