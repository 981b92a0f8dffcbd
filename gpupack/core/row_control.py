"""Control: what the host asks of the rows of one batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.errors import InputError


class Control:
    """Requests of the host for the rows of one batch, int32 `[CONTROL_WIDTH, batch]`; reusable.

    `reset(batch)` clears it. The columns are views and may be written directly: `flags`
    (`layout.CONTROL_*` bits), `visible_len` and `finished_len` (-1: unset), `finish_code`, `match`.
    """

    def __init__(self, capacity: int) -> None:
        self._buffer = np.zeros(L.CONTROL_WIDTH * capacity, np.int32)
        self.capacity = capacity
        self.reset(0)

    def reset(self, batch: int) -> Control:
        """Ask nothing of `batch` rows; returns itself."""
        if not 0 <= batch <= self.capacity:
            raise InputError(f"batch: expected 0 to {self.capacity} rows, got {batch}")
        self.words: NDArray[np.int32] = self._buffer[: L.CONTROL_WIDTH * batch].reshape(L.CONTROL_WIDTH, batch)
        self.words[:] = 0
        self.visible_len[:] = -1
        self.finished_len[:] = -1
        return self

    @property
    def flags(self) -> NDArray[np.int32]:
        """`layout.CONTROL_*` bits, int32 `[batch]`."""
        return self.words[L.CONTROL_FLAGS_ROW]

    @property
    def visible_len(self) -> NDArray[np.int32]:
        """Show a running request's output up to here only, int32 `[batch]`; -1: all of it."""
        return self.words[L.CONTROL_VISIBLE_LEN]

    @property
    def finished_len(self) -> NDArray[np.int32]:
        """Where a finished output ends, int32 `[batch]`; -1: at its last token."""
        return self.words[L.CONTROL_FINISHED_LEN]

    @property
    def finish_code(self) -> NDArray[np.int32]:
        """`layout.FINISH_*`, int32 `[batch]`."""
        return self.words[L.CONTROL_FINISH_CODE]

    @property
    def match(self) -> NDArray[np.int32]:
        """Token id or cap that goes with the finish code, int32 `[batch]`."""
        return self.words[L.CONTROL_MATCH]

    def finish(self, row: int, code: int = L.FINISH_HOST, *, finished_len: int = -1, match: int = 0) -> None:
        """End the request of `row`."""
        self.flags[row] |= L.CONTROL_FINISH
        self.finish_code[row], self.finished_len[row], self.match[row] = code, finished_len, match

    def take(self, rows: NDArray[np.int32]) -> Control:
        """The same for a subset of rows, in a control of its own."""
        part = Control(len(rows)).reset(len(rows))
        part.words[:] = self.words[:, rows]
        return part


CONTROL_BITS = L.CONTROL_SKIP | L.CONTROL_HOLD | L.CONTROL_FLUSH | L.CONTROL_FINISH | L.CONTROL_RETRACTED
HOLD_AND_FLUSH = L.CONTROL_HOLD | L.CONTROL_FLUSH


def check_control(words: NDArray[np.int32]) -> None:
    """Raise InputError for what is wrong in control rows, int32 `[CONTROL_WIDTH, B]`, whatever their requests are.

    What depends on a request's lengths is checked where these are known.
    """
    flags, code = words[L.CONTROL_FLAGS_ROW], words[L.CONTROL_FINISH_CODE]
    ends = (flags & L.CONTROL_FINISH) != 0
    for name, values, bad in (
        ("flags", flags, ((flags & ~CONTROL_BITS) != 0) | ((flags & HOLD_AND_FLUSH) == HOLD_AND_FLUSH)),
        ("finish_code", code, ends & ((code <= L.FINISH_NONE) | (code > L.FINISH_HOST))),
        ("finished_len", words[L.CONTROL_FINISHED_LEN], ends & (words[L.CONTROL_FINISHED_LEN] < -1)),
        ("visible_len", words[L.CONTROL_VISIBLE_LEN], words[L.CONTROL_VISIBLE_LEN] < -1),
    ):
        if np.count_nonzero(bad):
            row = int(bad.argmax())
            raise InputError(f"control.{name}: expected {EXPECTED[name]}, got {values[row]} (row {row})")


EXPECTED = {
    "flags": "known bits and not HOLD with FLUSH",
    "finish_code": "1 to 5 with FINISH",
    "finished_len": "-1 or an output length",
    "visible_len": "-1 or an output length",
}
NO_CONTROL = Control(0).words
