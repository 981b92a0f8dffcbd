"""HostJudged: the requests of a streamer that the host judges, from admission to end, behind one gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.errors import InputError
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Judge, Request, Resume
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket
from gpupack.streamer.host_finish import Gate
from gpupack.streamer.passthrough import ConveyedFinder
from gpupack.text.stop_strings import StopStringJudge


class HostJudged:
    """Which requests go through the gate, and which of those the stop-string judge looks at; by slot.

    The gate is made for the first of them. `judge` is the streamer's, passed with each call.
    """

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self._gate: Gate | None = None
        self._control = Control(packer.config.batch_capacity)
        self._finder = ConveyedFinder(packer.config.batch_capacity)
        self._judged_here = np.zeros(packer.config.capacity, np.bool_)  # the stop-string judge looks at it
        self._gated = np.zeros(packer.config.capacity, np.bool_)

    def judges_of(self, requests: Sequence[Request], judge: StopStringJudge | None) -> list[Judge]:
        """Who judges each request; InputError if there is nobody for one of them."""
        judges = [request.judged_by(self._packer.config.eos_token_ids) for request in requests]
        if "host" in judges and (judge is None or not self._packer.convey):
            rid = requests[judges.index("host")].rid
            missing = "a StopStringJudge at the streamer" if self._packer.convey else "Packer(convey=True)"
            raise InputError(f"judge: {rid} is host-judged, expected {missing}")
        return judges

    def admit(
        self,
        handles: NDArray[np.int64],
        requests: Sequence[Request],
        resumes: Sequence[Resume],
        judges: Sequence[Judge],
        judge: StopStringJudge | None,
    ) -> None:
        """Begin those of the requests that the host judges."""
        slots = handles & 0xFFFFFFFF
        self._judged_here[slots] = [by == "host" for by in judges]
        gated = np.array([by != "device" for by in judges], np.bool_) & self._packer.convey
        self._gated[slots] = gated
        chosen = np.flatnonzero(gated).tolist()
        if chosen:
            self._gate = self._gate or Gate(self._packer.config)
            self._gate.admit(handles[gated], [requests[i] for i in chosen], [resumes[i] for i in chosen])
        for i, by in enumerate(judges):
            if by == "host" and judge is not None:
                judge.admit(int(handles[i]), requests[i], resumes[i])

    def retract(self, slot: int, output_len: int | None) -> Resume | None:
        """Where the request of a slot stands, None if it does not go through the gate; see Gate.retract."""
        if not self._gated[slot]:
            return None
        assert self._gate is not None
        return self._gate.retract(slot, output_len)

    def end(self, handles: NDArray[np.int64], judge: StopStringJudge | None) -> list[Any]:
        """End handles; what the judge remembered of those it looked at."""
        slots = handles & 0xFFFFFFFF
        gated = slots[self._gated[slots]]
        if len(gated):
            assert self._gate is not None
            self._gate.end(gated)
        here = handles[self._judged_here[slots]].tolist()
        self._gated[slots] = self._judged_here[slots] = False
        return [judge.end(handle) for handle in here if judge is not None]

    def decide(self, packed: PackedStep, ticket: Ticket, judge: StopStringJudge | None) -> list[PackedStep]:
        """Packed steps that a step with conveyed rows becomes: the gate's rows and, if there are others, all joined.

        The last has the rows to send; all are to be released.
        """
        assert self._gate is not None
        conveyed = self._finder.find(packed, self._judged_here)
        control = None
        if ticket.control is not None or conveyed.judged:
            control = self._control.reset(len(conveyed.rows))
            if ticket.control is not None:
                control.words[:] = ticket.control[:, conveyed.batch_rows]
                self._gate.fit(conveyed, control, ticket.mode)
            if conveyed.judged:
                assert judge is not None
                here = np.flatnonzero(self._judged_here[conveyed.slots])
                running = here[~self._gate.finished(conveyed.slots[here])]
                judge.judge(conveyed, running.tolist(), control)
        gated = self._gate.pack(conveyed, control, ticket.mode)
        if packed.header(L.H_CONVEYED) == packed.rows:
            return [gated]
        return [gated, self._gate.join(packed, gated, ticket.mode)]
