"""PoolHandles: the engine's request pool as a packer's slots; a handle is its index with its generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.request import Request
from gpupack.packer.packer import Packer
from gpupack.packer.slots import SlotTable
from gpupack.sglang.unsupported import why_unsupported

MAX_TOP_LOGPROBS = 20


class UnsupportedByDevice(Exception):  # noqa: N818  (a way, not a fault: the host takes the batch from the engine's lists)
    """Why nothing of a batch is packed on the device."""


class PoolSlots(SlotTable):
    """Slots that the engine's pool gives and takes back; `give` says which the next `take` is about."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._free = []
        self._given: NDArray[np.int64] = np.empty(0, np.int64)

    def give(self, handles: NDArray[np.int64]) -> None:
        """Handles, int64 `[n]`, of requests that will be admitted; those that had their slots before have ended."""
        self._given = handles

    def take(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        """See SlotTable.take."""
        slots = self._given & 0xFFFFFFFF
        self.generations[slots] = self._given >> L.SLOT_BITS
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._live += self.requests[slot] is None
            self.requests[slot] = request
        return self._given


class PoolHandles:
    """Handles of batches; requests that the packer has not met are admitted on the way.

    The engine raises the generation of an index when it gives it to a request, so a handle ends when its index is
    given again: a request that was retracted has an index and a generation of its own when it comes back, and what
    is in flight under the old ones is dropped as stale.

    Parameters
    ----------
    packer
        Whose slots are replaced, before it has any.
    generations
        int64 `[capacity]`, on the host: the pool's own, read with each batch.
    """

    def __init__(self, packer: Packer, generations: NDArray[np.int64]) -> None:
        self._packer, self._generations = packer, generations
        self._slots = packer.slots = PoolSlots(len(generations))
        self._met = np.full(len(generations), -1, np.int64)
        self._scores = np.zeros(len(generations), np.bool_)
        self._top = np.zeros(len(generations), np.int32)
        self._unfit = np.zeros(len(generations), np.bool_)
        self._why: dict[int, str] = {}  # by unfit index
        self._requests: dict[tuple[bool, int], Request] = {}

    def of(self, reqs: Sequence[Any], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Handles int64 `[n]` by pool index, int64 `[n]`, in stream order. UnsupportedByDevice without any."""
        generations = self._generations[indices]
        new = np.flatnonzero(self._met[indices] != generations).tolist()
        handles = generations << L.SLOT_BITS | indices
        if new:
            self._meet([reqs[row] for row in new], handles[new])
        unfit = self._unfit[indices]
        if np.count_nonzero(unfit):
            raise UnsupportedByDevice(self._why[int(indices[unfit.argmax()])])
        return handles

    def asked(self, indices: NDArray[np.int64]) -> tuple[bool, int]:
        """Whether one of these asked for logprobs, and the most top logprobs that one asked for."""
        return bool(self._scores[indices].any()), int(self._top[indices].max(initial=0))

    def _meet(self, reqs: Sequence[Any], handles: NDArray[np.int64]) -> None:
        indices = handles & 0xFFFFFFFF
        self._met[indices] = handles >> L.SLOT_BITS
        fit, requests = [], []
        for row, (req, index) in enumerate(zip(reqs, indices.tolist(), strict=True)):
            why = why_not_packed(req)
            self._unfit[index] = why is not None
            if why is not None:
                self._why[index] = why
                continue
            scores = bool(req.return_logprob)
            top = int(req.logprob.top_logprobs_num or 0) if scores else 0
            self._scores[index], self._top[index] = scores, top
            fit.append(row)
            requests.append(self._request(scores, top))
        if fit:
            self._slots.give(handles[fit])
            self._packer.endings += 1
            self._packer.admit(requests)

    def _request(self, scores: bool, top: int) -> Request:
        """What the packer needs to know of a request: how much of each token it asked for."""
        request = self._requests.get((scores, top))
        if request is None:
            request = Request("pool", judge="engine", return_logprob=scores, top_logprobs_num=top)
            self._requests[scores, top] = request
        return request


def why_not_packed(req: Any) -> str | None:
    """Why the batches of a request are not packed on the device; None: they are."""
    if req.return_logprob and req.logprob.token_ids_logprob is not None:
        return "token-ids logprobs"  # the engine gathers them request by request: there is no tensor of a batch
    if req.return_logprob and (req.logprob.top_logprobs_num or 0) > MAX_TOP_LOGPROBS:
        return f"more than {MAX_TOP_LOGPROBS} top logprobs"
    return why_unsupported(req)
