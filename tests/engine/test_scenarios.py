"""What the golden workload leaves out: aborts, token ids, hidden states, embeddings, many requests at once."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import table
from configurations import Configuration
from engines import MODELS, TOOLS, python_of, serve
from runs import Runs

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
    """One run; its `out` has the answers."""
    stats, out = folder / "stats.jsonl", folder / "answers.json"
    settings = ["GPUPACK_SGLANG=1", "GPUPACK_VERIFY=1", f"GPUPACK_WIRE={configuration.wire}", f"GPUPACK_STATS={stats}"]
    command = [str(python_of(configuration.version)), str(Path(__file__).with_name("scenarios.py")), name, str(out)]
    command += [str(MODELS / model), "gpupack" if plugged else "none", *(settings if plugged else [])]
    return serve([*command, "--", *configuration.arguments], folder, out, stats, path=TOOLS)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The runs of all tests; one of the engine without the plugin for both wires."""
    folder = tmp_path_factory.mktemp("scenarios")

    def begin(runs, given):
        what = given["name"], given["model"], given["configuration"]
        runs.begin(given["name"], scenario, *what, folder / given["name"], plugged=False)
        runs.begin(given["configuration"].name, scenario, *what, folder / given["configuration"].name, plugged=True)

    with Runs.all_of(request, begin) as runs:
        yield runs


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("name", "model", "configuration", "reasons"), BOTH_WIRES, ids=lambda value: getattr(value, "name", "")
)
def test_nothing_changes(name, model, configuration, reasons, runs):
    engine, plugged = runs.of(name), runs.of(configuration.name)
    answers, ours = (json.loads(one.out.read_text()) for one in (engine, plugged))
    differ = sum(a != b for a, b in zip(answers, ours, strict=True))
    table.add(configuration.name, len(answers), plugged.stats, differ, engine.seconds + plugged.seconds)
    assert "gpupack is active" in plugged.log
    assert differ == 0
    assert plugged.stats["differences"] == 0
    assert set(plugged.stats["fallbacks"]) == set(reasons)
