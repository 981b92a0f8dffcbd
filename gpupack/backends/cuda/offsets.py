"""ArenaPlaces: where the arenas lie in a device's one, and the words that begin handles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.slot_state import family_width, record_places
from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.request import FRESH, Resume


class ArenaPlaces:
    """First words of state, rings and counters (the order of `HostArenas.parts`), and how many words there are."""

    def __init__(self, config: PackerConfig) -> None:
        self.config = config
        capacity = config.capacity
        self.tokens = capacity * L.STATE_WIDTH
        self.logprobs = self.tokens + capacity * config.window
        self.families = self.logprobs + capacity * config.window * config.logprobs
        self.spec = self.families + capacity * config.family_positions * config.family_width
        self.words = self.spec + capacity * config.spec_width

    def ring(self, slot: int, channel: int, widths: int = 0) -> tuple[int, NDArray[np.int64]]:
        """First word of a slot's ring, and of its places the words, int64 `[window, width]`."""
        config = self.config
        if channel == L.CHANNEL_FAMILIES:
            start = self.families + slot * config.family_positions * config.family_width
            return start, record_places(config, int(widths))
        start = self.logprobs if channel == L.CHANNEL_LOGPROBS else self.tokens
        return start + slot * config.window, np.arange(config.window, dtype=np.int64)[:, None]

    def installed(
        self, slots: NDArray[np.int64], rows: NDArray[np.int32], resumes: Sequence[Resume]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Words that begin handles, int64 `[n]`, and what to write there: state, unsent items, counters."""
        width = self.config.spec_width
        own = slots[:, None]
        index = [own * L.STATE_WIDTH + np.arange(L.STATE_WIDTH), self.spec + own * width + np.arange(width)]
        counts = [resume.spec_counts if len(resume.spec_counts) else np.zeros(width, np.int32) for resume in resumes]
        values = [rows, np.array(counts, np.int32)]
        for slot, row, resume in zip(slots.tolist(), rows, resumes, strict=True):
            if resume is FRESH:
                continue
            scores = np.asarray(resume.unsent_logprobs, np.float32).view(np.int32)
            for channel, cursor, items, words in (
                (L.CHANNEL_TOKENS, resume.token_cursor, resume.unsent_tokens, 1),
                (L.CHANNEL_LOGPROBS, resume.logprob_cursor, scores, 1),
                (L.CHANNEL_FAMILIES, resume.logprob_cursor, resume.unsent_families, family_width(int(row[L.WIDTHS]))),
            ):
                if len(items):
                    start, places = self.ring(slot, channel, int(row[L.WIDTHS]))
                    positions = np.arange(cursor, cursor + len(items) // words) % len(places)
                    index.append(start + places[positions])
                    values.append(np.asarray(items, np.int32))
        return np.concatenate([part.ravel() for part in index]), np.concatenate([part.ravel() for part in values])
