"""The arenas of a packer in host memory, and the writes that begin and end a handle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.config import PackerConfig
from gpupack.errors import InputError
from gpupack.request import Request, Resume


def check_admission(requests: Sequence[Request], resumes: Sequence[Resume], config: PackerConfig) -> None:
    """Raise InputError for the first request that a packer of this configuration cannot serve."""
    for request, resume in zip(requests, resumes, strict=True):
        if request.return_logprob and not config.logprobs:
            raise InputError(f"return_logprob of {request.rid}: expected False with PackerConfig(logprobs=False)")
        resume.check(request.rid, config.backlog_limit, request.return_logprob)


def state_rows(
    handles: NDArray[np.int64],
    requests: Sequence[Request],
    resumes: Sequence[Resume],
    config: PackerConfig,
    *,
    conveyed: Sequence[bool],
    judged: Sequence[bool],
) -> NDArray[np.int32]:
    """State of newly admitted requests, int32 `[n, STATE_WIDTH]`, one row a handle."""
    rows = np.zeros((len(requests), L.STATE_WIDTH), np.int32)
    rows[:, L.GENERATION] = handles >> L.SLOT_BITS
    rows[:, L.FINISHED_LEN] = -1
    for i, (request, resume) in enumerate(zip(requests, resumes, strict=True)):
        stops = request.stop_ids(config.eos_token_ids) if judged[i] else []
        stops = stops[: L.MAX_STOP_IDS]
        rows[i, L.FLAGS] = (
            L.STATE_LIVE
            | L.STATE_STREAM * request.stream
            | L.STATE_JUDGED * judged[i]
            | L.STATE_CONVEYED * conveyed[i]
            | L.STATE_LOGPROBS * request.return_logprob
            | len(stops) << L.STOP_COUNT_SHIFT
        )
        rows[i, L.OUTPUT_LEN] = resume.output_len
        rows[i, L.TOKEN_CURSOR] = resume.token_cursor
        rows[i, L.LOGPROB_CURSOR] = resume.logprob_cursor
        own = request.stream_interval or config.stream_interval
        rows[i, L.INTERVAL] = own if request.stream else config.force_interval
        rows[i, L.MAX_NEW_TOKENS] = request.max_new_tokens
        rows[i, L.STOP_0 : L.STOP_0 + len(stops)] = stops
    return rows


class HostArenas:
    """State and rings in host memory: state int32 `[capacity, STATE_WIDTH]`, rings `[capacity, window]`.

    Logprobs lie as int32 bit patterns. Output item `p` of a slot is at `p % window` of its ring, as
    long as it is unsent.
    """

    def __init__(self, config: PackerConfig) -> None:
        self.state = np.zeros((config.capacity, L.STATE_WIDTH), np.int32)
        self.token_ring = np.zeros((config.capacity, config.window), np.int32)
        scores = (config.capacity, config.window) if config.logprobs else (1, 1)
        self.logprob_ring = np.zeros(scores, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the arenas."""
        return self.state.nbytes + self.token_ring.nbytes + self.logprob_ring.nbytes

    def install(self, slots: NDArray[np.int64], rows: NDArray[np.int32], resumes: Sequence[Resume]) -> None:
        """Begin handles: write their state, and what a resumed one has not sent yet."""
        for slot, resume in zip(slots.tolist(), resumes, strict=True):
            self._write(self.token_ring[slot], resume.token_cursor, resume.unsent_tokens)
            if len(resume.unsent_logprobs):
                bits = np.asarray(resume.unsent_logprobs, np.float32).view(np.int32)
                self._write(self.logprob_ring[slot], resume.logprob_cursor, bits)
        self.state[slots] = rows

    def end(self, slots: NDArray[np.int64]) -> None:
        """End handles: rows that still come for them find no live slot."""
        self.state[slots, L.FLAGS] = 0

    def unsent(self, slot: int, begin: int, end: int, *, logprobs: bool = False) -> NDArray[np.int32]:
        """Copy of the ring's output items [begin, end), int32 (logprobs as bit patterns)."""
        ring = self.logprob_ring if logprobs else self.token_ring
        return ring[slot, np.arange(begin, end) % ring.shape[1]]

    @staticmethod
    def _write(ring: NDArray[np.int32], begin: int, items: NDArray[np.int32]) -> None:
        ring[np.arange(begin, begin + len(items)) % len(ring)] = items
