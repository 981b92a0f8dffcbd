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

    def count_step(self, sent: PackedStep, taken: PackedStep) -> None:
        """Add one step: the rows as they are sent, and the step as it was taken in.

        They are the same, or joined from it and the gate's rows with the counts of both, or the gate's
        alone: then the stale rows that the packer saw are added.
        """
        self.steps += 1
        header = sent.header_words
        for name, field in _SUMMED.items():
            self._totals[name] += header[field]
        if taken.header(L.H_CONVEYED) == taken.rows and sent is not taken:
            self._totals["stale_rows"] += taken.header(L.H_STALE)

    def count_frame(self, size: int) -> None:
        """Add one frame of `size` bytes."""
        self.frames += 1
        self.frame_bytes += size

    def snapshot(self) -> dict[str, int]:
        """All counters by name, since the start."""
        own = {name: getattr(self, name) for name in ("steps", "frames", "frame_bytes", "dropped_rows", "reopened")}
        return own | self._totals
