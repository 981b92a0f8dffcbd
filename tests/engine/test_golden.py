"""The golden workload on a real engine: the same answers with the plugin, and the same messages at the streamer."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest
import table
from configurations import GOLDEN, GOLDEN_FULL, Configuration
from engines import difference, golden
from runs import Runs

FULL = os.environ.get("GPUPACK_ENGINE", "") == "full"


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The runs of all tests: an engine without the plugin serves all configurations in which it is the same."""
    folder = tmp_path_factory.mktemp("golden")

    def begin(runs, parameters):
        configuration = parameters["configuration"]
        runs.begin(configuration.key, golden, configuration, folder / configuration.name, plugged=False)
        runs.begin(configuration.name, golden, configuration, folder / configuration.name, plugged=True)

    with Runs.all_of(request, begin) as runs:
        yield runs


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("configuration", GOLDEN + (GOLDEN_FULL if FULL else []), ids=lambda c: c.name)
def test_answers_and_messages_are_the_engines(configuration: Configuration, runs):
    engine, plugged = runs.of(configuration.key), runs.of(configuration.name)
    stats = plugged.stats
    assert f"gpupack is active: version {version('gpupack')}, sglang {configuration.version}" in plugged.log
    assert "gpupack is active" not in engine.log
    differ, requests, report = difference(engine, plugged)
    table.add(configuration.name, requests, stats, differ, engine.seconds + plugged.seconds)
    assert differ == 0, report
    assert stats["verified"] == stats["steps"] > requests
    assert stats["differences"] == 0, plugged.log[-3000:]
    assert stats["fallbacks"] == {}
    if configuration.path == "frames":
        assert stats["frames"] > 0
        assert stats["messages"] == 0
    else:
        assert stats["frames"] == 0 < stats["messages"]
