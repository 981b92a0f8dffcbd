"""What the golden workload leaves out: aborts, token ids, hidden states, embeddings, many requests at once."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import table
from configurations import Configuration
from engines import MODELS, TOOLS, python_of, read_stats, run

pytestmark = pytest.mark.skipif(os.environ.get("GPUPACK_ENGINE", "") != "full", reason="make test-engine-full")

MANY = ("--max-running-requests", "128", "--max-total-tokens", "16384")
# Scenario, model, configuration, reasons of batches that went through the engine's own streamer.
SCENARIOS = [
    (
        "token_ids",
        "tiny",
        Configuration("skip-tokenizer-init", wire="native", arguments=("--skip-tokenizer-init",)),
        (),
    ),
    ("hidden_states", "tiny", Configuration("hidden states", arguments=("--enable-return-hidden-states",)), ()),
    ("embeddings", "tiny", Configuration("embeddings", arguments=("--is-embedding",)), ("embedding model",)),
    ("aborts", "nano", Configuration("aborts"), ()),
    ("crowd", "nano", Configuration("128 at once", arguments=MANY), ()),
]
BOTH_WIRES = [
    (name, model, replace(configuration, name=f"{configuration.name}, {wire}", wire=wire), reasons)
    for name, model, configuration, reasons in SCENARIOS
    for wire in ("compatible", "native")
]


def scenario(name, model, configuration, folder, *, plugged):
    """The answers of one run, the plugin's counters, the server's log."""
    folder.mkdir(parents=True)
    stats, out = folder / "stats.jsonl", folder / "answers.json"
    settings = ["GPUPACK_SGLANG=1", "GPUPACK_VERIFY=1", f"GPUPACK_WIRE={configuration.wire}", f"GPUPACK_STATS={stats}"]
    command = [str(python_of(configuration.version)), str(Path(__file__).with_name("scenarios.py")), name, str(out)]
    command += [str(MODELS / model), "gpupack" if plugged else "none", *(settings if plugged else [])]
    done = run([*command, "--", *configuration.arguments], folder, path=TOOLS)
    log = (folder / "server.log").read_text()
    assert done.returncode == 0, done.stdout[-2000:] + log[-2000:]
    return json.loads(out.read_text()), read_stats(stats), log


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "model", "configuration", "reasons"), BOTH_WIRES, ids=lambda value: getattr(value, "name", "")
)
def test_nothing_changes(name, model, configuration, reasons, tmp_path):
    engine, _, _ = scenario(name, model, configuration, tmp_path / "engine", plugged=False)
    plugged, stats, log = scenario(name, model, configuration, tmp_path / "plugged", plugged=True)
    differ = (
        sum(a != b for a, b in zip(engine, plugged, strict=True)) if isinstance(engine, list) else engine != plugged
    )
    table.add(configuration.name, len(engine), stats, int(differ))
    assert "gpupack is active" in log
    assert not differ
    assert stats["differences"] == 0
    assert set(stats["fallbacks"]) == set(reasons)
