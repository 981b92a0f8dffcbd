"""The demo's model: continuous batching must not change what any request would have got alone."""

import copy
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gpupack.demo.model import SlotModel
from gpupack.demo.sampling import sample

pytestmark = pytest.mark.model

NUM_SLOTS, MAX_LEN, NEW_TOKENS = 6, 128, 24


@dataclass(frozen=True)
class Arrival:
    """A request that takes its slot at the first step >= `step` at which the slot is free."""

    step: int
    slot: int
    prompt: str


ARRIVALS = [
    Arrival(0, 3, "Hi"),  # ends with end-of-sequence before the others do
    Arrival(0, 0, "Why is the sky blue?"),
    Arrival(4, 5, "Explain how a bicycle stays upright, in plain words, to somebody who has never seen one before."),
    Arrival(6, 1, "What is the capital of France?"),
    Arrival(7, 3, "List three fruits."),  # waits for the slot of "Hi" and takes it over
]


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on busy cores several threads spin at every barrier: 20 times slower was measured
    yield SlotModel.load(num_slots=NUM_SLOTS, max_len=MAX_LEN, device="cpu")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(model):
    """Per prompt, what transformers generates from it alone with its own attention and cache."""
    reference = copy.deepcopy(model.causal_lm)
    reference.set_attn_implementation("sdpa")
    outputs = {}
    for prompt in (arrival.prompt for arrival in ARRIVALS):
        ids = torch.tensor([model.encode_chat(prompt)])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack(out.logits).squeeze(1).topk(2).values
        # Batching changes the order of float sums: with a smaller lead, equality would be a coin toss.
        assert (best[:, 0] - best[:, 1]).min() > 0.01, f"choose another prompt than {prompt!r}"
        outputs[prompt] = out.sequences[0, ids.shape[1] :].tolist()
    return outputs


def greedy(logits):
    return sample(logits, torch.zeros(len(logits)), None)[0]


def serve(model, arrivals):
    """Continuous batching with the overlap schedule's habit: a request is decoded once more after it has finished."""
    outputs = {arrival.prompt: [] for arrival in arrivals}
    waiting, running, last = deque(arrivals), deque(), {}
    batches = []
    for step in range(1000):
        if not waiting and not running:
            return outputs, batches
        if running:
            running.rotate(1)  # another order of the slots at every step
            slots = [arrival.slot for arrival in running]
            ended = [
                a for a in running if len(outputs[a.prompt]) == NEW_TOKENS or last[a.slot] in model.info.eos_token_ids
            ]
            token_ids = greedy(model.decode(slots, torch.tensor([last[slot] for slot in slots])))
            batches.append(slots)
            for arrival, token in zip(list(running), token_ids.tolist(), strict=True):
                if arrival in ended:
                    running.remove(arrival)
                else:
                    outputs[arrival.prompt].append(token)
                    last[arrival.slot] = token
        taken = {arrival.slot for arrival in running}
        new = [arrival for arrival in waiting if arrival.step <= step and arrival.slot not in taken]
        if new:
            logits = model.prefill([a.slot for a in new], [model.encode_chat(a.prompt) for a in new])
            for arrival, token in zip(new, greedy(logits).tolist(), strict=True):
                waiting.remove(arrival)
                running.append(arrival)
                outputs[arrival.prompt].append(token)
                last[arrival.slot] = token
    raise AssertionError("the requests did not end")


def test_continuous_batching_equals_generate_alone(model, expected):
    outputs, batches = serve(model, ARRIVALS)
    assert outputs == expected
    # The script did what it is for: four at once, slots out of order, slot 3 given to a second request meanwhile.
    assert max(len(slots) for slots in batches) >= 4
    assert any(slots != sorted(slots) for slots in batches)
    assert len(expected["Hi"]) < NEW_TOKENS
    assert sum(3 in slots for slots in batches) > NEW_TOKENS
    assert len({len(model.encode_chat(arrival.prompt)) for arrival in ARRIVALS}) >= 4


def test_lengths_follow_prefill_and_decode(model):
    model.prefill([4, 2], [[1, 2, 3], [5]])
    model.decode([2], torch.tensor([7]))
    assert model.lengths[[4, 2]].tolist() == [3, 2]
    model.prefill([4], [[9, 9]])
    assert model.lengths[[4, 2]].tolist() == [2, 2]


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_other_slots_keep_their_bits(model, kind):
    torch.manual_seed(0)
    model.kv.normal_()
    before = model.kv.clone()
    model.prefill(kind([4, 1]), [[1, 2, 3], [4] * 9])
    others = [0, 2, 3, 5]
    assert torch.equal(model.kv[:, :, others], before[:, :, others])
    prompts = model.kv.clone()
    model.decode(kind([1, 4]), torch.tensor([5, 6]))
    assert torch.equal(model.kv[:, :, others], before[:, :, others])
    # In the decoded slots exactly one column is written.
    for slot, length in ((1, 9), (4, 3)):
        changed = (model.kv[:, :, slot] != prompts[:, :, slot]).any(dim=(-1, -2)).all(dim=(0, 1))  # [columns]
        assert changed.nonzero().flatten().tolist() == [length]


def test_columns_behind_a_row_have_no_influence(model):
    prompts, token_ids = [[1, 2, 3], [4] * 9], torch.tensor([5, 6])
    model.kv.zero_()
    model.prefill([4, 1], prompts)
    clean = model.decode([4, 1], token_ids)
    model.prefill([4, 1], prompts)
    model.kv[:, :, 4, 3:] = 1e4  # in reach of the batch's longest row, behind this one
    model.kv[:, :, :, 10:] = torch.nan  # behind all rows: a masked column would still turn 0 * NaN into NaN
    assert torch.equal(model.decode([4, 1], token_ids), clean)
    model.kv.zero_()


def test_full_slot_is_decoded_once_more_then_refused(model):
    model.prefill([2], [[7] * (MAX_LEN - 1)])
    model.prefill([5, 0], [[8] * MAX_LEN, [9, 9]])
    others = [0, 1, 2, 3, 4]
    before = model.kv[:, :, others].clone()
    assert model.decode([5], torch.tensor([1])).isfinite().all()
    assert torch.equal(model.kv[:, :, others], before)
    model.decode([0, 2], torch.tensor([1, 1]))  # 127 to 128: the last regular position
    state = model.kv.clone(), model.lengths.clone()
    with pytest.raises(ValueError, match=f"slot 5: .* length {MAX_LEN + 1}, the limit is {MAX_LEN}"):
        model.decode([2, 5], torch.tensor([1, 1]))
    assert torch.equal(model.kv, state[0])
    assert torch.equal(model.lengths, state[1])
    model.prefill([5], [[3]])
    model.decode([5], torch.tensor([1]))


def test_prompt_beyond_max_len_is_refused_before_anything_is_written(model):
    state = model.kv.clone(), model.lengths.clone()
    with pytest.raises(ValueError, match=f"slot 3: prompt of length {MAX_LEN + 1}, .* limit {MAX_LEN}"):
        model.prefill([1, 3], [[1, 2], [1] * (MAX_LEN + 1)])
    assert torch.equal(model.kv, state[0])
    assert torch.equal(model.lengths, state[1])


@pytest.mark.parametrize(
    ("slots", "prompts", "message"),
    [
        ([], [], "n > 0"),
        ([[0]], [[1]], "integers"),
        ([0.0], [[1]], "integers"),
        ([NUM_SLOTS], [[1]], f"expected 0 to {NUM_SLOTS - 1}, got {NUM_SLOTS}"),
        ([-1], [[1]], "got -1"),
        ([1, 1], [[1], [1]], "at most once"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), [[1]], "on the host"),
        ([0, 1], [[1]], "one per slot"),
        ([0], [[]], "length 0"),
        ([0], [[-1]], "outside"),
        ([0], [[49152]], "outside"),
    ],
)
def test_bad_prefill_arguments_are_named(model, slots, prompts, message):
    with pytest.raises(ValueError, match=message):
        model.prefill(slots, prompts)


def test_bad_decode_arguments_are_named(model):
    model.prefill([0, 1], [[1], [1]])
    with pytest.raises(ValueError, match=r"token_ids: expected torch.int64 \[2\]"):
        model.decode([0, 1], torch.tensor([1]))
    with pytest.raises(ValueError, match="int32"):
        model.decode([0], torch.tensor([1], dtype=torch.int32))
    fresh = SlotModel(model.causal_lm, model.tokenizer, model.info, num_slots=1, max_len=4)
    with pytest.raises(ValueError, match="slot 0: nothing to continue"):
        fresh.decode([0], torch.tensor([1]))


@pytest.mark.parametrize(
    ("num_slots", "max_len", "name"), [(0, 4, "num_slots"), (1, 0, "max_len"), (1, 8192, "max_len")]
)
def test_sizes_that_cannot_be_are_refused(model, num_slots, max_len, name):
    with pytest.raises(ValueError, match=name):
        SlotModel(model.causal_lm, model.tokenizer, model.info, num_slots=num_slots, max_len=max_len)


def test_info_and_chat_encoding(model):
    assert model.info.vocab_size == len(model.tokenizer) == 49152
    assert [model.tokenizer.decode([i]) for i in model.info.eos_token_ids] == ["<|im_end|>"]
    text = model.tokenizer.backend_tokenizer.decode(model.encode_chat("Hi"), skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_temperature_draws_follow_the_softmax():
    rows = 40_000
    logits = torch.tensor([2.0, 0.5, -torch.inf, 1.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        generator = torch.Generator().manual_seed(1)
        token_ids, _ = sample(logits.repeat(rows, 1), torch.full((rows,), temperature), generator)
        probs = torch.softmax(logits / temperature, dim=0)
        deviation = torch.bincount(token_ids, minlength=5) / rows - probs
        assert (deviation.abs() <= 4 * (probs * (1 - probs) / rows).sqrt()).all()  # exactly 0 for the banned token


def test_greedy_rows_take_the_argmax_beside_sampled_ones():
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(2))
    temperature = torch.where(torch.arange(64) % 2 == 0, 0.0, 1.5)
    mixed, _ = sample(logits, temperature, torch.Generator().manual_seed(3))
    warm, _ = sample(logits, torch.full((64,), 1.5), torch.Generator().manual_seed(3))
    best = logits.argmax(dim=1)
    assert torch.equal(mixed[::2], best[::2])
    assert torch.equal(mixed[1::2], warm[1::2])  # a draw does not depend on the neighbours' temperatures
    assert (warm != best).sum() > 32
    again, _ = sample(logits, temperature, torch.Generator().manual_seed(3))
    assert torch.equal(mixed, again)


def test_logprobs_are_log_softmax_without_temperature():
    logits = 5 * torch.randn(33, 777, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    token_ids, logprobs = sample(logits, torch.linspace(0, 2, 33), torch.Generator().manual_seed(5))
    assert (token_ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    assert torch.equal(logprobs, torch.log_softmax(logits, dim=1)[torch.arange(33), token_ids])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("logits", "temperature"), [((3,), (3,)), ((3, 0), (3,)), ((3, 4), (2,)), ((3, 4), (3, 1))])
def test_sampling_refuses_shapes_that_do_not_fit(logits, temperature):
    with pytest.raises(ValueError, match="expected shape"):
        sample(torch.zeros(logits), torch.zeros(temperature), None)
