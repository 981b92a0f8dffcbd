"""Counters of an output path, with `snapshot()`."""

from __future__ import annotations

from gpupack import layout as L
from gpupack.packed import PackedStep

_SUMMED = {
    "rows": L.H_ROWS,
    "tokens": L.H_TOKENS,
    "logprobs": L.H_LOGPROBS,
    "stale_rows": L.H_STALE,
    "late_rows": L.H_LATE,
    "early_rows": L.H_EARLY,
    "held_rows": L.H_HELD,
    "finished": L.H_FINISHED,
}


class Metrics:
    """Counts steps, frames, bytes and the header words of every packed step; host only."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(_SUMMED, 0)
        self.steps = 0
        self.frames = 0
        self.frame_bytes = 0
        self.dropped_rows = 0
        self.reopened = 0

    def count_step(self, packed: PackedStep) -> None:
        """Add one step, as it is sent."""
        self.steps += 1
        header = packed.header_words
        for name, field in _SUMMED.items():
            self._totals[name] += header[field]

    def count_frame(self, size: int) -> None:
        """Add one frame of `size` bytes."""
        self.frames += 1
        self.frame_bytes += size

    def snapshot(self) -> dict[str, int]:
        """All counters by name, since the start."""
        own = {name: getattr(self, name) for name in ("steps", "frames", "frame_bytes", "dropped_rows", "reopened")}
        return own | self._totals
