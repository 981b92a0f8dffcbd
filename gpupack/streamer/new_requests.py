"""Openings: what the receiver has been told of each handle, and what the next frame must tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.request import Resume
from gpupack.packer.slots import SlotTable
from gpupack.streamer.host_columns import HostColumns
from gpupack.wire.metadata import OpeningRecord


class Openings:
    """Per slot: opening record sent, sent before under another handle, restarted; and handles that ended.

    Columns are bool or int64 `[capacity]`, by slot, on the host. `ended` and `dropped` are handles that
    ended without a final row: those whose request may come back, and those whose request will not.
    """

    def __init__(self, slots: SlotTable, columns: HostColumns) -> None:
        capacity = len(slots.requests)
        self._slots = slots
        self._columns = columns
        self._opened = np.zeros(capacity, np.bool_)
        self._known = np.zeros(capacity, np.bool_)  # a row was sent, on this stream or under an earlier handle
        self._restarted = np.zeros(capacity, np.bool_)  # the next row tells the receiver to discard what it holds
        self._restarts = np.zeros(capacity, np.int64)
        self._unopened = 0  # live handles that are not opened
        self.ended: list[int] = []
        self.dropped: list[int] = []

    def admit(self, slots: NDArray[np.int64], resumes: Sequence[Resume]) -> None:
        """Begin handles; they open with their first row."""
        self._opened[slots] = False
        self._unopened += len(slots)
        self._known[slots] = [resume.opened for resume in resumes]
        self._restarted[slots] = [resume.restarted for resume in resumes]
        self._restarts[slots] = [resume.restarts for resume in resumes]

    def end(self, handles: NDArray[np.int64], final: NDArray[np.bool_], *, resumable: bool) -> None:
        """End handles; `final` says which had their final row, bool `[n]`."""
        opened = self._opened[handles & 0xFFFFFFFF]
        told = self.ended if resumable else self.dropped
        told += handles[opened & ~final].tolist()
        self._unopened -= int(np.count_nonzero(~opened))

    def resume(self, slot: int, resume: Resume, watch: Any) -> Resume:
        """A slot's resume with what the receiver has been told, and what the judge remembers."""
        return replace(
            resume,
            opened=bool(self._known[slot]),
            restarted=bool(self._restarted[slot]),
            restarts=int(self._restarts[slot]),
            watch=watch,
        )

    def reopen(self) -> None:
        """A new stream: every live handle opens again, and nothing of the old one needs telling."""
        self._opened[:] = False
        self._unopened = len(self._slots)
        self.ended, self.dropped = [], []

    def rows_to_open(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Rows, of those with these slots, that need an opening record, int64 `[n]`."""
        return np.flatnonzero(~self._opened[slots]) if self._unopened else _NO_ROWS

    def open(
        self, rows: NDArray[np.int64], slots: NDArray[np.int32], starts: NDArray[np.int32], row_flags: NDArray[np.int32]
    ) -> list[OpeningRecord]:
        """Opening records of `rows`, which count as told from now on; sets their bits in `row_flags`."""
        opening = slots[rows]
        row_flags[rows] |= L.ROW_OPENING
        row_flags[rows[self._restarted[opening]]] |= L.ROW_RESTARTED
        records = [self._record(row, int(slots[row]), int(starts[row])) for row in rows.tolist()]
        self._opened[opening] = self._known[opening] = True
        self._restarted[opening] = False
        self._unopened -= len(rows)
        return records

    def _record(self, row: int, slot: int, start: int) -> OpeningRecord:
        request = self._slots.requests[slot]
        assert request is not None, "rows of ended handles are dropped when a step is taken in"
        return OpeningRecord(
            row=row,
            rid=request.rid,
            worker=request.http_worker_ipc,
            decoded_text=request.decoded_text,
            prompt_tail=request.prompt_tail,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
            no_stop_trim=request.no_stop_trim,
            prompt_tokens=request.prompt_len,
            tokens_before=start,
            resumed=bool(self._known[slot]),
            restarts=int(self._restarts[slot]),
            return_logprob=request.return_logprob,
            top_logprobs_num=request.top_logprobs_num,
            token_ids_logprob=[int(token) for token in request.token_ids_logprob],
            return_hidden_states=request.return_hidden_states,
            **self._columns.opening(slot),
        )


_NO_ROWS = np.empty(0, np.int64)
