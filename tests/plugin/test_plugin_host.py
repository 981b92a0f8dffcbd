"""Parts of the SGLang plugin that need no SGLang: settings, the rule over bare lengths, counters."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupack import EmitPolicy
from gpupack.core import layout as L
from gpupack.core.errors import ConfigError
from gpupack.sglang import emit_rule as C
from gpupack.sglang.plugin import hook, register
from gpupack.sglang.settings import Settings
from gpupack.sglang.stats import Stats
from gpupack.sglang.unsupported import why_unsupported

VARIABLES = ("GPUPACK_SGLANG", "GPUPACK_BACKEND", "GPUPACK_WIRE", "GPUPACK_STATS", "GPUPACK_VERIFY")


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_its_variable_the_plugin_does_nothing():
    register()  # there is no sglang here, so more than nothing would raise
    assert Settings.read() == Settings(active=False)


@pytest.mark.parametrize(
    ("installed", "backend", "said"),
    [
        ("9.9.9", "host", "sglang 9.9.9 is not known (known: 0.5.23, 0.5.16); the engine is left as it is"),
        ("0.5.16", "device", "GPUPACK_BACKEND=device is not for sglang 0.5.16; the backend is host"),
    ],
)
def test_what_it_does_not_know_it_leaves_alone_and_says_so(caplog, installed, backend, said):
    hook(installed, Settings(active=True, backend=backend))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert said in record.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("GPUPACK_SGLANG", "yes"), ("GPUPACK_BACKEND", "tpu"), ("GPUPACK_WIRE", "pigeon"), ("GPUPACK_VERIFY", "2")],
)
def test_a_bad_variable_is_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}: expected .*, got '{value}'"):
        Settings.read()


def test_settings_are_read(monkeypatch):
    monkeypatch.setenv("GPUPACK_SGLANG", "1")
    monkeypatch.setenv("GPUPACK_WIRE", "native")
    assert Settings.read() == Settings(active=True, wire="native")


REQUEST = st.fixed_dictionaries(
    {
        "stream": st.booleans(),
        "scores": st.booleans(),
        "asks": st.booleans(),
        "interval": st.integers(0, 4),
        "cursor": st.integers(0, 60),
        "behind": st.integers(0, 2),
        "new": st.integers(0, 9),
        "end": st.sampled_from([C.RUNNING, C.RUNNING, C.LATE, 0, 3]),
        "held": st.booleans(),
        "retracted": st.booleans(),
    }
)


def scored_before(request):
    return max(request["cursor"] - request["behind"], 0)


def due(request, policy, default, force):
    """SPEC.md section 2 for one request that runs."""
    length = request["cursor"] + request["new"]
    if not request["stream"]:
        return length % force == 0
    every = request["interval"] or default
    if policy.stream_rule == "modulo":
        return length % every == (1 if every > 1 else 0)
    return every == 1 or request["new"] >= every or (request["cursor"] == 0 and request["new"] > 0)


@given(
    requests=st.lists(REQUEST, max_size=20),
    newer=st.booleans(),
    scores=st.booleans(),
    default=st.integers(1, 3),
    skipped=st.integers(-1, 19),
)
def test_the_rule_over_lengths_is_the_specs(requests, newer, scores, default, skipped):
    policy = EmitPolicy.sglang_0_5_23() if newer else EmitPolicy.sglang_0_5_16()
    n, force = len(requests), 5
    cursors = np.zeros((n + 2, C.CURSOR_WIDTH), np.int32)
    slots = np.arange(n, dtype=np.int32)[::-1].copy()
    for slot, one in zip(slots.tolist(), requests, strict=True):
        flags = L.STATE_STREAM * one["stream"] | L.STATE_LOGPROBS * one["scores"] | C.ASK_HOLD * one["asks"]
        cursors[slot] = flags, one["interval"] if one["stream"] else 0, one["cursor"], scored_before(one), 0
    lens = np.array([one["cursor"] + one["new"] for one in requests], np.int32)
    ends = np.array([one["end"] for one in requests], np.int32)
    actions, rows = np.empty(n, np.uint8), np.zeros((C.ROW_WIDTH, n), np.int32)
    retracted = np.array([one["retracted"] for one in requests], np.uint8)

    asks = C.find_due(cursors, slots, lens, ends, skipped, default, force, policy.bits, actions)
    assert asks == np.count_nonzero(actions == C.ASKS)
    for i in np.flatnonzero(actions == C.ASKS):
        actions[i] = C.NOTHING if requests[i]["held"] else C.SENDS
    facts = np.zeros(C.FACTS, np.int64)
    sent = C.advance(cursors, slots, lens, ends, actions, retracted, scores, policy.bits, rows, facts)

    expected = []
    for i, one in enumerate(requests):
        held = one["stream"] and one["asks"] and one["held"]
        sends = one["end"] >= 0 or (one["end"] == C.RUNNING and due(one, policy, default, force) and not held)
        if i == skipped or one["end"] == C.LATE or not sends:
            continue
        end = one["end"] if one["end"] >= 0 else int(lens[i])
        score_end = end if one["retracted"] and newer else max(end, 1)
        asked = (scored_before(one), score_end) if scores and one["scores"] else (0, 0)
        expected.append([i, int(slots[i]), one["cursor"], end, *asked, 1])
    assert rows[:, :sent].T.tolist() == expected
    asks_scores = [scores and requests[row[0]]["scores"] for row in expected]
    assert facts.tolist() == [
        sum(max(row[3] - row[2], 0) for row in expected),
        all(row[3] == row[2] + 1 == lens[row[0]] for row in expected),
        scores and all(asks and row[5] == row[4] + 1 for row, asks in zip(expected, asks_scores, strict=True)),
        any(asks and row[4] < row[2] for row, asks in zip(expected, asks_scores, strict=True)),
    ]
    assert all(cursors[row[1], C.TOKEN_CURSOR] == row[3] and cursors[row[1], C.OPENED] for row in expected)


class Bare:
    """A request with nothing out of the ordinary."""

    input_embeds = None
    return_hidden_states: bool | str = False


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("beam_group", object(), "beam search"),
        ("return_sampling_mask", True, "sampling masks"),
        ("dllm_config", object(), "diffusion LM"),
        ("input_embeds", [[0.0]], "input embeddings"),
        ("return_hidden_states", "last", "hidden states of the last token"),
        ("return_hidden_states", True, None),
    ],
)
def test_what_is_left_to_the_engine(name, value, why):
    request = Bare()
    assert why_unsupported(request) is None
    setattr(request, name, value)
    assert why_unsupported(request) == why


def test_counters_land_in_the_file(tmp_path):
    stats = Stats("scheduler", str(tmp_path / "stats.jsonl"), {"wire": "native"})
    stats.count_step(3, 7, 120, 1_500_000, 500_000)
    assert stats.count_fallback("beam search")
    assert not stats.count_fallback("beam search")
    stats.write()
    (line,) = (tmp_path / "stats.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert (told["steps"], told["rows"], told["tokens"], told["bytes"]) == (1, 3, 7, 120)
    assert (told["pack_ms"], told["send_ms"], told["wire"]) == (1.5, 0.5, "native")
    assert told["fallbacks"] == {"beam search": 2}
