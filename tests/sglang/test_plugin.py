"""The plugin's streamer in the engine's place: each message compared with the engine's own, at the streamer."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from life import Life
from plugged import plugged
from real import NEWER, VERSION, RealStreamer, Setting, output_streamer

from gpupack.sglang.verify import differences
from gpupack.sglang.versions import VERSIONS

STEPS = int(os.environ.get("GPUPACK_SGLANG_STEPS", "500"))
LIFE = 250  # steps
SETTINGS = [
    Setting("plain"),
    Setting("speculative", speculative=True, stream_interval=4),
    Setting("no logprobs", logprobs=False, stream_interval=2, storage_tier="none"),
    Setting("decode server", decode_server=True, stream_interval=3, dp_rank=2, storage_tier="DiskBackend"),
]


WIRES = ["compatible", "native", "native, only what frames carry"]


def live(life, streamer, steps, unsupported=0.0, bare=False):
    """Some steps of a life; this part of the requests is left to the engine; `bare`: no columns of the host's own."""
    messages = []
    for _ in range(steps):
        step = life.step()
        for req in step.reqs:
            if req.rid not in life.seen:
                life.seen.add(req.rid)
                if life.rng.random() < unsupported:
                    req.input_embeds = [[0.0]]
                if bare:
                    req.return_hidden_states = req.return_routed_experts = req.return_indexer_topk = False
            if bare:
                req.customized_info = None
        message = streamer.stream(step.reqs, step.return_logprob, step.skip, idle=step.idle)
        messages.append(pickle.loads(pickle.dumps(message)))  # its lists are the requests' own, which go on
    return messages


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("unsupported", [0.0, 0.1], ids=["covered", "some unsupported"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_message_is_the_engines(setting, unsupported, wire, words):
    lives = max(STEPS // len(SETTINGS) // LIFE, 1)
    for number in range(lives):
        streamer = plugged(setting, wire=wire.partition(",")[0])
        life = Life(np.random.default_rng([SETTINGS.index(setting), number]), setting, words, f"{setting.name}.")
        life.seen = set()
        live(life, streamer, LIFE, unsupported, bare=wire == WIRES[2])
        stats = streamer.streamer.gpupack.stats.snapshot()
        assert stats["differences"] == 0
        assert stats["verified"] == stats["steps"] > 20
        assert stats["steps"] + sum(stats["fallbacks"].values()) == LIFE
        assert set(stats["fallbacks"]) == ({"input embeddings"} if unsupported else set())
        assert (stats["frames"] > 0) == (NEWER and wire != "compatible")
        assert wire != WIRES[2] or set(stats["unframed"]) <= {"logprobs of tokens that went as a message"}


@pytest.mark.parametrize("wire", ["compatible", "native"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_two_lives_alike_one_on_the_engine_alone(setting, wire, words):
    """Without the verifier, which moves the requests' own cursors: here a batch finds what the one before left."""
    messages = []
    for streamer in (RealStreamer(setting), plugged(setting, verify=False, wire=wire)):
        life = Life(np.random.default_rng([9, SETTINGS.index(setting)]), setting, words, "alike.")
        life.seen = set()
        messages.append(live(life, streamer, 2 * LIFE, unsupported=0.1))
    assert set(streamer.streamer.gpupack.stats.fallbacks) == {"input embeddings"}
    for engine, ours in zip(*messages, strict=True):
        found = [name for name, _, _ in differences(engine, ours)]
        assert found in ([], ["time_stats"])  # the clock's, not ours


def test_slots_end_with_their_requests(words):
    setting = Setting("plain")
    streamer = plugged(setting)
    life = Life(np.random.default_rng(7), setting, words, "slots.")
    life.seen = set()
    live(life, streamer, LIFE)
    request_states = streamer.streamer.gpupack.request_states
    del life
    streamer.stream([], False, idle=True)
    assert len(request_states) == 0


def test_a_custom_streamer_is_left_alone(words):
    class Custom(output_streamer.SchedulerOutputStreamer):
        pass

    streamer = plugged(Setting("plain"), Custom, custom=True)
    life = Life(np.random.default_rng(8), Setting("plain"), words, "custom.")
    life.seen = set()
    live(life, streamer, 50)
    assert streamer.streamer.gpupack.stats.snapshot()["fallbacks"] == {"custom streamer": 50}


def test_the_preset_is_the_versions():
    assert VERSIONS[VERSION].policy.stream_rule == ("unsent" if NEWER else "modulo")
