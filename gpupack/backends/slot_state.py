"""The arenas of a packer in host memory, and the writes that begin and end a handle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import InputError
from gpupack.core.request import FRESH, Request, Resume


def check_admission(requests: Sequence[Request], resumes: Sequence[Resume], config: PackerConfig) -> None:
    """Raise InputError for the first request that a packer of this configuration cannot serve."""
    for request, resume in zip(requests, resumes, strict=True):
        if request.return_logprob:
            _check_scores(request, config)
        if resume is not FRESH:
            resume.check(request, config)


def _check_scores(request: Request, config: PackerConfig) -> None:
    if not config.logprobs:
        raise InputError(f"return_logprob of {request.rid}: expected False with PackerConfig(logprobs=False)")
    for name, asked, limit in (
        ("top_logprobs_num", request.top_logprobs_num, "max_top_logprobs"),
        ("token_ids_logprob", len(request.token_ids_logprob), "max_token_ids_logprobs"),
    ):
        most = getattr(config, limit)
        if asked > most:
            raise InputError(f"{name} of {request.rid}: expected at most {limit} = {most}, got {asked}")


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
    # A column at a time: one number at a time costs several times as much.
    stops = [
        request.stop_ids(config.eos_token_ids)[: L.MAX_STOP_IDS] if by_loop else ()
        for request, by_loop in zip(requests, judged, strict=True)
    ]
    rows[:, L.FLAGS] = [
        L.STATE_LIVE
        | L.STATE_STREAM * request.stream
        | L.STATE_JUDGED * by_loop
        | L.STATE_CONVEYED * passed_on
        | L.STATE_LOGPROBS * request.return_logprob
        | len(ids) << L.STOP_COUNT_SHIFT
        for request, ids, by_loop, passed_on in zip(requests, stops, judged, conveyed, strict=True)
    ]
    rows[:, L.INTERVAL] = [
        (request.stream_interval or config.stream_interval) if request.stream else config.force_interval
        for request in requests
    ]
    rows[:, L.MAX_NEW_TOKENS] = [request.max_new_tokens for request in requests]
    rows[:, L.WIDTHS] = [request.widths if request.return_logprob else 0 for request in requests]
    if requests:  # of none NumPy would not see that there are six columns
        rows[:, L.STOP_0 :] = [(*ids, *_NO_STOPS[len(ids) :]) for ids in stops]
    for row, resume in zip(rows, resumes, strict=True):
        if resume is not FRESH:
            row[L.OUTPUT_LEN] = resume.output_len
            row[L.TOKEN_CURSOR], row[L.LOGPROB_CURSOR] = resume.token_cursor, resume.logprob_cursor
    return rows


_NO_STOPS = (0,) * L.MAX_STOP_IDS


def family_width(widths: int) -> int:
    """Words of a position's record, from a slot's `layout.WIDTHS`."""
    return 2 * (widths & L.TOP_WIDTH_MASK) + (widths >> L.IDS_WIDTH_SHIFT)


class HostArenas:
    """State and rings in host memory.

    `state` int32 `[capacity, STATE_WIDTH]`; `token_ring` and `logprob_ring` `[capacity, window]`;
    `family_ring` `[capacity, family_window * family_width]`; `spec` `[capacity, spec_width]`. Logprobs lie as
    int32 bit patterns. Output item `p` of a slot is at `p % window` of its ring, as long as it is unsent; its
    family record at `p % family_window`, with the width that its request asked for.
    """

    def __init__(self, config: PackerConfig) -> None:
        self.config = config
        self.state = np.zeros((config.capacity, L.STATE_WIDTH), np.int32)
        self.token_ring = np.zeros((config.capacity, config.window), np.int32)
        scores = (config.capacity, config.window) if config.logprobs else (1, 1)
        self.logprob_ring = np.zeros(scores, np.int32)
        self.family_ring = np.zeros((config.capacity, config.family_positions * config.family_width), np.int32)
        self.spec = np.zeros((config.capacity, config.spec_width), np.int32)

    @property
    def parts(self) -> list[NDArray[np.int32]]:
        """The arenas that this configuration has, in the order in which a device keeps them in one."""
        channels = [self.token_ring] + [self.logprob_ring] * self.config.logprobs
        return [self.state, *channels, self.family_ring, self.spec]

    @property
    def nbytes(self) -> int:
        """Bytes of the arenas."""
        return sum(part.nbytes for part in self.parts)

    def install(self, slots: NDArray[np.int64], rows: NDArray[np.int32], resumes: Sequence[Resume]) -> None:
        """Begin handles: write their state, and what a resumed one has not sent yet."""
        self.spec[slots] = 0
        for slot, row, resume in zip(slots.tolist(), rows, resumes, strict=True):
            if resume is FRESH:
                continue
            self._write(self.token_ring[slot], resume.token_cursor, resume.unsent_tokens)
            if len(resume.unsent_logprobs):
                bits = np.asarray(resume.unsent_logprobs, np.float32).view(np.int32)
                self._write(self.logprob_ring[slot], resume.logprob_cursor, bits)
            if len(resume.unsent_families):
                places, width = self._records(int(row[L.WIDTHS]))
                records = np.asarray(resume.unsent_families, np.int32).reshape(-1, width)
                positions = np.arange(resume.logprob_cursor, resume.logprob_cursor + len(records))
                self.family_ring[slot][places[positions % len(places)]] = records
            if len(resume.spec_counts):
                self.spec[slot] = resume.spec_counts
        self.state[slots] = rows

    def end(self, slots: NDArray[np.int64]) -> None:
        """End handles: rows that still come for them find no live slot."""
        self.state[slots, L.FLAGS] = 0

    def unsent(self, slot: int, begin: int, end: int, channel: int = L.CHANNEL_TOKENS) -> NDArray[np.int32]:
        """Copy of a channel's output items [begin, end), int32: values as bit patterns, families as records."""
        positions = np.arange(begin, end)
        if channel == L.CHANNEL_FAMILIES:
            places, _ = self._records(int(self.state[slot, L.WIDTHS]))
            return self.family_ring[slot][places[positions % len(places)]].ravel()
        ring = self.logprob_ring if channel == L.CHANNEL_LOGPROBS else self.token_ring
        return ring[slot, positions % ring.shape[1]]

    def _records(self, widths: int) -> tuple[NDArray[np.int64], int]:
        """Where the words of each record lie in a slot's family ring, `[family_window, width]`; and the width."""
        return record_places(self.config, widths), family_width(widths)

    @staticmethod
    def _write(ring: NDArray[np.int32], begin: int, items: NDArray[np.int32]) -> None:
        ring[np.arange(begin, begin + len(items)) % len(ring)] = items


def record_places(config: PackerConfig, widths: int) -> NDArray[np.int64]:
    """Words of a slot's family ring that the record of each place takes, int64 `[family_window, width]`."""
    starts = np.arange(config.family_positions, dtype=np.int64) * config.family_width
    return starts[:, None] + np.arange(family_width(widths), dtype=np.int64)
