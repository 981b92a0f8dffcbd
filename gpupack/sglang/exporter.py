"""Exporter: the plugin's counters on the engine's metrics port, by its own prometheus_client."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter

COUNTED = {
    "steps": "Batches whose output went gpupack's way",
    "rows": "Rows sent",
    "tokens": "Tokens sent",
    "bytes": "Bytes sent to the detokenizer",
    "packed": "Batches whose rows came from steps packed by the device backend",
    "held": "Due rows held back by a stop string",
    "pack_ms": "CPU milliseconds spent on finding and making what is sent",
    "send_ms": "CPU milliseconds spent on encoding and sending",
}


class Exporter:
    """Counters named `gpupack_<name>`, and `gpupack_fallbacks` by reason."""

    def __init__(self) -> None:
        self._counters = {name: Counter(f"gpupack_{name}", text) for name, text in COUNTED.items()}
        self._fallbacks = Counter("gpupack_fallbacks", "Batches through the engine's own streamer", ["reason"])
        self._last: dict[str, float] = {}

    def update(self, snapshot: dict[str, Any]) -> None:
        """Add what has come since the last snapshot."""
        values = {name: (self._counters[name], snapshot[name]) for name in COUNTED}
        for reason, count in snapshot["fallbacks"].items():
            values[f"fallback {reason}"] = (self._fallbacks.labels(reason), count)
        for name, (counter, value) in values.items():
            counter.inc(max(value - self._last.get(name, 0), 0))
            self._last[name] = value
