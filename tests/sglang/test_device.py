"""The device backend under the plugin's streamer: each message compared with the engine's own, at the streamer."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from life import Life
from plugged import plugged
from real import NEWER, RealStreamer, Setting
from sampled import Sampled

from gpupack.sglang.device.backend import ELSEWHERE, OUTSIDE
from gpupack.sglang.verify import differences

pytestmark = pytest.mark.skipif(not NEWER, reason="the device backend is for 0.5.23")

STEPS = int(os.environ.get("GPUPACK_SGLANG_STEPS", "500"))
LIFE = 250  # steps
SETTINGS = [
    Setting("plain"),
    Setting("interval", stream_interval=4, dp_rank=1),
    Setting("speculative", speculative=True, stream_interval=2),
    Setting("no logprobs", logprobs=False),
]
REASONS = {"token-ids logprobs", "input embeddings", ELSEWHERE, OUTSIDE}


def live(life, streamer, sampled, steps, *, unsupported=0.0, unprepared=0.0):
    """Some steps of a life; parts of the requests are left to the engine, parts of the steps are not launched."""
    device, seen, rng = streamer.streamer.gpupack.device, set(), np.random.default_rng(steps)
    messages = []
    for _ in range(steps):
        step = life.step()
        for req in step.reqs:
            if req.rid not in seen and rng.random() < unsupported:
                req.input_embeds = [[0.0]]
            seen.add(req.rid)
        launched, reqs = sampled.of(step), step.reqs
        if launched is not None and rng.random() >= unprepared:
            reqs = process(device, step, *launched)
        messages.append(kept(streamer.stream(reqs, step.return_logprob, step.skip, idle=step.idle)))
        device.end()
        sampled.leave(step)
    return messages


def kept(message):
    """A copy: the lists in it are the requests' own, which go on."""
    return pickle.loads(pickle.dumps(message))


def process(device, step, batch, result):
    """Launch a step, and begin its result with the outputs as they were before the life committed it."""
    device.relayed(batch, result)
    device.copied(result.gpupack)
    committed = [req.output_ids for req in batch.reqs]
    for part, ids in zip(step.parts, committed, strict=True):
        part.req.output_ids = ids[: len(ids) - part.taken]
    device.begin(batch, result)
    for req, ids in zip(batch.reqs, committed, strict=True):
        req.output_ids = ids
    return batch.reqs


def life_of(setting, seed, words, *, bare=False):
    """A life with fewer requests for token-ids logprobs; `bare`: nothing in it that no frame carries."""
    life, rng = Life(np.random.default_rng(seed), setting, words, f"{setting.name}."), np.random.default_rng(seed)
    original = life.newcomers.make

    def newcomer():
        req = original()
        if rng.random() < 0.9:
            req.logprob.token_ids_logprob = None
        if bare:
            req.return_hidden_states = req.return_routed_experts = req.return_indexer_topk = False
        return req

    life.newcomers.make = newcomer
    if bare:
        life.outputs.custom_keys = ()
    return life


def make(setting, seed, words, *, bare=False, **settings):
    """A life, the plugin's streamer, and what the life's steps sample."""
    life = life_of(setting, seed, words, bare=bare)
    sampled = Sampled(life)
    return life, plugged(setting, backend="device", scheduler=sampled.scheduler, **settings), sampled


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wire", ["compatible", "native", "native, only what frames carry"])
@pytest.mark.parametrize("mixed", [False, True], ids=["every step", "some steps and requests left out"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_message_is_the_engines(setting, mixed, wire, words):
    lives, packed, frames = max(STEPS // len(SETTINGS) // LIFE, 1), 0, 0
    wire, _, bare = wire.partition(",")
    for number in range(lives):
        life, streamer, sampled = make(
            setting, [77, SETTINGS.index(setting), number], words, wire=wire, bare=bool(bare)
        )
        more = {"unsupported": 0.05, "unprepared": 0.1} if mixed else {}
        live(life, streamer, sampled, LIFE, **more)
        stats = streamer.streamer.gpupack.stats.snapshot()
        assert stats["differences"] == 0
        assert stats["verified"] == stats["steps"] > 20
        assert set(stats["unpacked"]) <= REASONS
        assert mixed or not stats["fallbacks"]
        packed, frames = packed + stats["packed"], frames + stats["frames"]
    assert packed > lives * LIFE / (10 if mixed else 3)
    assert not bare or frames > 20 * lives


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_two_lives_alike_one_on_the_engine_alone(setting, words):
    """Without the verifier: here a batch finds what the one before left, whichever way it went."""
    seed = [78, SETTINGS.index(setting)]
    life, engine = life_of(setting, seed, words), RealStreamer(setting)
    steps = (life.step() for _ in range(2 * LIFE))
    expected = [kept(engine.stream(s.reqs, s.return_logprob, s.skip, idle=s.idle)) for s in steps]
    life, ours, sampled = make(setting, seed, words, verify=False)
    got = live(life, ours, sampled, 2 * LIFE)
    assert ours.streamer.gpupack.stats.packed > 20
    for one, other in zip(expected, got, strict=True):
        assert [name for name, _, _ in differences(one, other)] in ([], ["time_stats"])  # the clock's, not ours


def test_a_disaggregated_server_is_left_to_the_host(words):
    life, streamer, sampled = make(Setting("decode server", decode_server=True), 5, words)
    live(life, streamer, sampled, 100)
    stats = streamer.streamer.gpupack.stats.snapshot()
    assert stats["packed"] == stats["differences"] == 0
    assert set(stats["unpacked"]) <= {"disaggregation", OUTSIDE}
