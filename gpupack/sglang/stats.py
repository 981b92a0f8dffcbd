"""Stats: what the plugin did, as counters, a file of JSON lines, and the engine's metrics port."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

WRITE_EVERY_S = 0.2


class Stats:
    """Counters of one process. `file` gets a line, all counters since the start, whenever they have changed.

    `pack_ms`, `send_ms` and `engine_ms` are CPU time of the scheduler's thread: the wall's would count the other
    processes of a busy machine. One thread counts; another, of its own, writes file and metrics a few times a second.
    """

    def __init__(self, process: str, file: str = "", labels: dict[str, Any] | None = None) -> None:
        self.process, self._file, self.labels = process, file, dict(labels or {})
        self.steps = self.rows = self.tokens = self.bytes = self.held = 0
        self.pack_ns = self.send_ns = self.engine_ns = 0
        self.frames = self.messages = 0
        self.unframed: dict[str, int] = {}
        self.packed = 0
        self.unpacked: dict[str, int] = {}
        self.verified = self.differences = 0
        self.fallbacks: dict[str, int] = {}
        self._exporter: Any = None
        self._thread: threading.Thread | None = None

    def count_step(self, rows: int, tokens: int, size: int, pack_ns: int, send_ns: int) -> None:
        """Add a batch that went gpupack's way."""
        self.steps += 1
        self.rows += rows
        self.tokens += tokens
        self.bytes += size
        self.pack_ns += pack_ns
        self.send_ns += send_ns

    def count_fallback(self, why: str) -> bool:
        """Add a batch that went the engine's way; true for the first of its reason."""
        self.fallbacks[why] = self.fallbacks.get(why, 0) + 1
        return self.fallbacks[why] == 1

    def count_unframed(self, why: str) -> bool:
        """Add a batch of the native wire that went as a message; true for the first of its reason."""
        self.unframed[why] = self.unframed.get(why, 0) + 1
        return self.unframed[why] == 1

    def count_unpacked(self, why: str) -> bool:
        """Add a batch of the device backend that was made of the engine's lists; true for the first of its reason."""
        self.unpacked[why] = self.unpacked.get(why, 0) + 1
        return self.unpacked[why] == 1

    def snapshot(self) -> dict[str, Any]:
        """All counters by name."""
        return {
            "process": self.process,
            "pid": os.getpid(),
            **self.labels,
            "steps": self.steps,
            "rows": self.rows,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "frames": self.frames,
            "messages": self.messages,
            "unframed": dict(self.unframed),
            "packed": self.packed,
            "unpacked": dict(self.unpacked),
            "held": self.held,
            "pack_ms": round(self.pack_ns / 1e6, 3),
            "send_ms": round(self.send_ns / 1e6, 3),
            "engine_ms": round(self.engine_ns / 1e6, 3),
            "verified": self.verified,
            "differences": self.differences,
            "fallbacks": dict(self.fallbacks),
        }

    def start(self, *, metrics: bool) -> None:
        """Begin to write; `metrics`: to the engine's metrics port too."""
        if metrics:
            from gpupack.sglang.exporter import Exporter

            self._exporter = Exporter()
        if self._file or metrics:
            self._thread = threading.Thread(target=self._write_on, name="gpupack-stats", daemon=True)
            self._thread.start()

    def write(self) -> None:
        """Write one line now."""
        with Path(self._file).open("a") as out:
            out.write(json.dumps({"time": time.time(), **self.snapshot()}) + "\n")

    def _write_on(self) -> None:
        written: dict[str, Any] = {}
        while True:
            now = self.snapshot()
            if now != written:
                if self._file:
                    self.write()
                if self._exporter is not None:
                    self._exporter.update(now)
                written = now
            time.sleep(WRITE_EVERY_S)
