"""StreamedRequests: the requests of an output streamer, from admission to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.array_checks import host_array
from gpupack.core.errors import InputError
from gpupack.core.request import FRESH, FinishReason, Request, Resume, is_reason
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket
from gpupack.streamer.frame_room import SIDE_BYTES, opening_bytes
from gpupack.streamer.host_columns import HostColumns
from gpupack.streamer.host_judged import HostJudged
from gpupack.streamer.new_requests import Openings
from gpupack.text.stop_strings import StopStringJudge
from gpupack.wire.encoder import largest_frame


class StreamedRequests:
    """What a streamer knows of its requests by handle; the base of OutputStreamer, which sends their rows.

    `max_frame_bytes` is the sender's; None: there is none, and what only rows carry is not kept.
    """

    def __init__(
        self,
        packer: Packer,
        judge: StopStringJudge | None,
        *,
        whole_hidden_states: bool,
        disaggregated_decode: bool,
        max_frame_bytes: int | None,
    ) -> None:
        self.packer = packer
        self.judge = judge
        self._max_frame_bytes = max_frame_bytes
        self._final = np.zeros(packer.config.capacity, np.bool_)  # slot: final row sent
        self._judged = HostJudged(packer)
        self._columns = HostColumns(
            packer.slots,
            whole_hidden_states=whole_hidden_states,
            disaggregated_decode=disaggregated_decode,
            room=0 if max_frame_bytes is None else self.room(packer.config.batch_capacity),
        )
        self._openings = Openings(packer.slots, self._columns)

    def admit(self, requests: Sequence[Request], resume: Sequence[Resume | None] | None = None) -> NDArray[np.int64]:
        """Begin requests, int64 `[n]` handles; see Packer.admit. `resume` takes what `retract` gave.

        InputError, too, for a request whose opening record no frame could take.
        """
        if self._max_frame_bytes is not None:
            self._check_openings(requests)
        judges = self._judged.judges_of(requests, self.judge)
        handles = self.packer.admit(requests, resume)
        resumes = [entry or FRESH for entry in resume or [None] * len(requests)]
        slots = handles & 0xFFFFFFFF
        self._openings.admit(slots, resumes)
        self._columns.admit(slots, requests, resumes)
        self.packer.keep_handles = self._columns.asking > 0
        self._final[slots] = False
        self._judged.admit(handles, requests, resumes, judges, self.judge)
        return handles

    def room(self, rows: int) -> int:
        """Bytes that a frame of so many rows, all as full as they can be, has for its side record; from 0."""
        assert self._max_frame_bytes is not None, "asked with a sender only"
        rows = min(rows, self.packer.config.batch_capacity)
        largest = largest_frame(rows, self.packer.config.packed_shape)
        return max(self._max_frame_bytes - largest - SIDE_BYTES, 0)

    def _check_openings(self, requests: Sequence[Request]) -> None:
        sizes = [opening_bytes(request) for request in requests]
        room = self.room(1)
        if sizes and max(sizes) > room:
            largest = requests[sizes.index(max(sizes))]
            raise InputError(
                f"decoded_text of {largest.rid}: expected an opening record of at most {room} bytes, got {max(sizes)}"
            )

    def retire(self, handles: Any) -> None:
        """End handles, int64 `[n]`: after their final row, or to drop requests without one."""
        handles = host_array("handles", handles, (np.int64,), (1,))
        self.packer.retire(handles)
        self._forget(handles, resumable=False)

    def retract(self, handle: int, *, output_len: int | None = None) -> Resume:
        """End a handle whose request will come back; what to pass to `admit(resume=)`. See Packer.retract.

        For a request that the host or the engine judges, what was taken in is what counts; `output_len`,
        if given, must say the same.
        """
        handles = np.array([handle], np.int64)
        slot = int(self.packer.slots.slots_of(handles)[0])
        resume = self._judged.retract(slot, output_len)
        if resume is None:
            resume = self.packer.retract(handle, output_len=output_len)
        else:
            self.packer.retire(handles)
        resume = self._columns.resume(slot, resume)
        watches = self._forget(handles, resumable=True)
        return self._openings.resume(slot, resume, watches[0] if watches else None)

    def abort(self, handles: Any, reason: FinishReason) -> Ticket:
        """End running requests now: what was accepted before is in their final rows, what comes later is not.

        Returns a ticket to `send` in its turn, after the steps that were launched before.
        """
        if not is_reason(reason):
            raise InputError(f"reason: expected a dict with a type, of strings and numbers, got {reason!r}")
        handles = host_array("handles", handles, (np.int64,), (1,))
        self.packer.slots.slots_of(handles)
        control = Control(len(handles)).reset(len(handles))
        for row in range(len(handles)):
            control.finish(row, L.FINISH_HOST)
        ticket = self.packer.pack(handles, control=control)
        ticket.reasons.update(dict.fromkeys(handles.tolist(), reason))
        return ticket

    def attach(self, handle: int, **columns: Any) -> None:
        """Give what only the host has of a request to its next row; see HostColumns.attach.

        Does nothing without a sender.
        """
        if self._max_frame_bytes is not None:
            self._columns.attach(handle, **columns)

    def set_counts(self, handles: Any, **counts: Any) -> None:
        """Set counts of requests, int32 or int64 `[n]` each; see HostColumns.set_counts.

        Does nothing without a sender.
        """
        if self._max_frame_bytes is not None:
            self._columns.set_counts(handles, **counts)

    def _forget(self, handles: NDArray[np.int64], *, resumable: bool) -> list[Any]:
        """End handles here; what the judge remembered of those it looked at."""
        slots = handles & 0xFFFFFFFF
        self._openings.end(handles, self._final[slots], resumable=resumable)
        self._columns.end(slots)
        self.packer.keep_handles = self._columns.asking > 0
        return self._judged.end(handles, self.judge)
