"""Random lives: every column of every message of the real streamer, and the texts that come of them."""

from __future__ import annotations

import os
from itertools import count

import columns as message_columns
import numpy as np
import pytest
from life import WAYS, Life
from ours import Ours
from real import VERSION, RealStreamer, Setting
from tally import TALLY

from gpupack.sglang.payload import Payloads

STEPS = int(os.environ.get("GPUPACK_SGLANG_STEPS", "500"))
LIFE = 250  # steps
COUNTED = ("held_rows", "late_rows", "early_rows", "finished")
SETTINGS = [
    Setting("plain"),
    Setting("speculative", speculative=True, stream_interval=4),
    Setting("no logprobs", logprobs=False, stream_interval=2, storage_tier="none"),
    Setting("decode server", decode_server=True, stream_interval=3, dp_rank=2, storage_tier="DiskBackend"),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_column_and_every_text_is_the_real_one(setting, words, detokenizers, wire, tmp_path):
    payloads = Payloads()
    for number in count():
        left = STEPS // len(SETTINGS) - number * LIFE
        if left <= 0:
            break
        rng = np.random.default_rng([SETTINGS.index(setting), number])
        live(
            Life(rng, setting, words, f"{setting.name}.{number}."),
            min(left, LIFE),
            wire,
            payloads,
            detokenizers,
            tmp_path,
        )


def live(life, steps, wire, payloads, readers, folder):
    """One life of some steps on both."""
    real = RealStreamer(life.setting)
    with Ours(life.setting, f"ipc://{folder}/ours") as ours:
        for number in range(steps):
            step = life.step()
            where = f"sglang {VERSION}, life {life.newcomers.name}, step {number}"
            ours.send(step)
            sent = real.stream(step.reqs, step.return_logprob, step.skip, idle=step.idle)
            TALLY.steps[life.setting.name] += 1
            got = ours.receive()
            assert (sent is None) == (got is None), f"{where}: real {sent and sent.rids}, ours {got and got.rids}"
            if got is None:
                continue
            sent, made = wire.carry(sent), wire.carry(payloads.output(got))
            TALLY.compare(where, message_columns.of(sent), message_columns.of(made))
            compare_texts(where, readers, sent, made)
        TALLY.paths.update(life.events)
        TALLY.paths.update({name: ours.streamer.metrics.snapshot()[name] for name in COUNTED})


def compare_texts(where, readers, real, ours):
    """Two detokenizers of the package must make the same texts of both."""
    texts = [
        reader.handle_batch_token_id_out(message).output_strs
        for reader, message in zip(readers, (real, ours), strict=True)
    ]
    assert texts[0] == texts[1], where
    TALLY.texts += len(texts[0])
    TALLY.characters += sum(map(len, texts[0]))


def test_every_column_has_said_something():
    """The lives gave every column that is ever present a value that is not its default."""
    silent = {name for name in TALLY.compared if not TALLY.told[name]}
    assert silent == set(message_columns.ALWAYS_ABSENT)


def test_the_lives_went_every_way():
    """Each kind of step and of row came about; rows that go out early would not be the real ones."""
    missing = [way for way in WAYS if not TALLY.paths[way]]
    assert not missing or STEPS < 1000
    assert TALLY.paths["early_rows"] == 0
