"""The golden workload on a real engine: the same answers with the plugin, and the same messages at the streamer."""

from __future__ import annotations

import os

import pytest
import table
from configurations import GOLDEN, GOLDEN_FULL, Configuration
from engines import difference, golden

FULL = os.environ.get("GPUPACK_ENGINE", "") == "full"
_engine_runs = {}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("configuration", GOLDEN + (GOLDEN_FULL if FULL else []), ids=lambda c: c.name)
def test_answers_and_messages_are_the_engines(configuration: Configuration, tmp_path):
    engine = _engine_runs.get(configuration.key)
    if engine is None:
        engine = _engine_runs[configuration.key] = golden(configuration, tmp_path, plugged=False)
    plugged = golden(configuration, tmp_path, plugged=True)

    stats = plugged.stats
    assert f"gpupack is active: version {_version()}, sglang {configuration.version}" in plugged.log
    assert "gpupack" not in engine.log or "Skipping plugin gpupack" in engine.log
    differ, requests, report = difference(engine, plugged)
    table.add(configuration.name, requests, stats, differ)
    assert differ == 0, report
    assert stats["verified"] == stats["steps"] > requests
    assert stats["differences"] == 0, plugged.log[-3000:]
    assert stats["fallbacks"] == {}
    if configuration.path == "frames":
        assert stats["frames"] > 0
        assert stats["messages"] == 0
    else:
        assert stats["frames"] == 0 < stats["messages"]


def _version() -> str:
    from importlib.metadata import version

    return version("gpupack")
