"""Counters of an output path, with `snapshot()`."""

from __future__ import annotations

from operator import add

from gpupack.core import layout as L
from gpupack.core.packed_output import PackedStep

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
_OWN = ("steps", "frames", "frame_bytes", "dropped_rows", "dropped_extras", "reopened")


class Metrics:
    """Counts steps, frames, bytes and the header words of every packed step; host only."""

    def __init__(self) -> None:
        self._sums = [0] * L.HEADER_WORDS  # of the header's words, those that can be added up
        self.steps = 0
        self.frames = 0
        self.frame_bytes = 0
        self.dropped_rows = 0
        self.dropped_extras = 0  # rows whose extras, or some of them, found no room in a frame
        self.reopened = 0

    def count_step(self, sent: PackedStep, taken: PackedStep) -> None:
        """Add one step: the rows as they are sent, and the step as it was taken in.

        They are the same, or joined from it and the gate's rows with the counts of both, or the gate's
        alone: then the stale rows that the packer saw are added.
        """
        self.steps += 1
        self._sums = list(map(add, self._sums, sent.header_words))
        if sent is not taken and taken.header(L.H_CONVEYED) == taken.rows:
            self._sums[L.H_STALE] += taken.header(L.H_STALE)

    def count_frame(self, size: int) -> None:
        """Add one frame of `size` bytes."""
        self.frames += 1
        self.frame_bytes += size

    def snapshot(self) -> dict[str, int]:
        """All counters by name, since the start."""
        own = {name: getattr(self, name) for name in _OWN}
        return own | {name: self._sums[field] for name, field in _SUMMED.items()}
