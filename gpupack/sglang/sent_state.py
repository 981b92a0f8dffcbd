"""SentState: what the receiver of this process's frames has been told, by slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.sglang import emit_rule as C
from gpupack.sglang.batch_membership import BatchMembership
from gpupack.sglang.output_rows import OutputRows
from gpupack.sglang.request_states import RequestStates

Int32 = NDArray[np.int32]


class SentState:
    """Which requests are open on the stream, from which token on, and their newest reasoning tokens.

    Attributes
    ----------
    reasoning
        int64 `[slots]`: reasoning tokens as they stood in a request's last row.
    """

    def __init__(self, request_states: RequestStates) -> None:
        self._request_states = request_states
        self._open = np.zeros(0, np.int32)  # by slot: the generation that is open at the receiver, 0: none
        self._begin = np.zeros(0, np.int32)  # by slot: the first token that has been on the stream since it opened
        self.reasoning = np.zeros(0, np.int64)
        self._all_open: BatchMembership | None = None

    def opening_rows(self, out: OutputRows) -> list[int]:
        """Rows whose request is not open."""
        if out.batch.membership is self._all_open:
            return []
        self._reserve()
        slots = out.slots
        rows: list[int] = np.flatnonzero(self._open[slots] != self._request_states.generation[slots]).tolist()
        return rows

    def begins(self, out: OutputRows, opening: list[int]) -> Int32:
        """The first token of each row's request that has been on this stream, or comes with this frame."""
        begins: Int32 = self._begin[out.slots]
        begins[opening] = out.rows[C.TOKEN_BEGIN, opening]
        return begins

    def note(self, out: OutputRows, opening: list[int]) -> None:
        """These rows go out, and with them their reasoning tokens."""
        slots = out.slots
        if opening:
            opened = slots[opening]
            self._begin[opened] = out.rows[C.TOKEN_BEGIN, opening]
            self._open[opened] = self._request_states.generation[opened]
            self.reasoning[opened] = 0
        if out.odd:
            self.reasoning[slots[out.odd]] = [out.reqs[row].reasoning_tokens for row in out.odd]
        if out.final:
            self._open[slots[out.final]] = 0
        self._all_open = out.batch.membership if out.whole and not out.final else None

    def close(self, slots: Int32) -> list[int]:
        """Handles that are open of these slots; they are not any more."""
        self._reserve()
        self._all_open = None
        slots = slots[self._open[slots] != 0]
        handles: list[int] = (self._open[slots].astype(np.int64) << L.SLOT_BITS | slots).tolist()
        self._open[slots] = 0
        return handles

    def _reserve(self) -> None:
        lacking = len(self._request_states.generation) - len(self._open)
        if lacking:
            self._open = np.append(self._open, np.zeros(lacking, np.int32))
            self._begin = np.append(self._begin, np.zeros(lacking, np.int32))
            self.reasoning = np.append(self.reasoning, np.zeros(lacking, np.int64))
