"""PackedStep: what one step put out, as NumPy views of its buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.errors import ReleasedError


class PackedStep:
    """The rows and items of one step, in batch order; views die with `release()`.

    Columns are int32 `[rows]`; `token_indptr`, `logprob_indptr` and `families_indptr` int32 `[rows + 1]`;
    `token_ids` int32 `[tokens]`; `logprobs` float32 `[logprobs]`; `families` int32 words. All are
    views of one host buffer: nothing is copied, nothing synchronises. Using one after `release()` raises
    ReleasedError; arrays taken before stay NumPy views and must not be kept.
    """

    __slots__ = ("_buffer", "_header", "_on_release", "geometry", "has_logprobs", "spec_width")

    def __init__(
        self,
        buffer: NDArray[np.int32],
        geometry: L.PackedLayout,
        has_logprobs: bool,
        on_release: Callable[[NDArray[np.int32]], None] | None = None,
        *,
        spec_width: int = 0,
    ) -> None:
        self._buffer: NDArray[np.int32] | None = buffer
        self._header: list[int] | None = None
        self._on_release = on_release
        self.geometry = geometry
        self.has_logprobs = has_logprobs
        self.spec_width = spec_width

    @property
    def buffer(self) -> NDArray[np.int32]:
        """The whole step, int32 `[geometry.size]`."""
        if self._buffer is None:
            raise ReleasedError("this packed step was released; take what is needed before release()")
        return self._buffer

    @property
    def header_words(self) -> list[int]:
        """The header (`layout.H_*`) as Python numbers, read once."""
        if self._header is None:
            self._header = self.buffer[: L.HEADER_WORDS].tolist()
        return self._header

    def header(self, field: int) -> int:
        """One word of the header (`layout.H_*`)."""
        return self.header_words[field]

    def ready(self) -> bool:
        """True: it is here. With `result` this makes a packed step the Launched of a backend on the host."""
        return True

    def result(self) -> PackedStep:
        """Itself."""
        return self

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.header(L.H_ROWS)

    def column(self, field: int) -> NDArray[np.int32]:
        """Row column `field` (`layout.R_*`), int32 `[rows]`, or `[rows + 1]` for the three indptr."""
        entries = self.rows + (field >= L.R_TOKEN_INDPTR)
        start = self.geometry.column(field)
        return self.buffer[start : start + entries]

    @property
    def handles(self) -> NDArray[np.int64]:
        """Handle of every row, int64 `[rows]` (a copy)."""
        generation = self.column(L.R_GENERATION).astype(np.int64)
        return (generation << L.SLOT_BITS) | self.column(L.R_SLOT)

    @property
    def token_indptr(self) -> NDArray[np.int32]:
        """Offsets of each row's tokens, int32 `[rows + 1]`."""
        return self.column(L.R_TOKEN_INDPTR)

    @property
    def logprob_indptr(self) -> NDArray[np.int32]:
        """Offsets of each row's logprobs, int32 `[rows + 1]`."""
        return self.column(L.R_LOGPROB_INDPTR)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The deltas of all rows, joined, int32 `[tokens]`."""
        start = self.geometry.tokens
        return self.buffer[start : start + self.header(L.H_TOKENS)]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Logprobs of all rows, joined, float32 `[logprobs]`, bit for bit as they came in."""
        start = self.geometry.logprobs
        return self.buffer[start : start + self.header(L.H_LOGPROBS)].view(np.float32)

    @property
    def families_indptr(self) -> NDArray[np.int32]:
        """Offsets of each row's words in `families`, int32 `[rows + 1]`."""
        return self.column(L.R_FAMILIES_INDPTR)

    @property
    def families(self) -> NDArray[np.int32]:
        """Records of top-k and token-ids logprobs of all rows, joined, int32 `[families]` (`layout.WIRE_SECTIONS`)."""
        start = self.geometry.families
        return self.buffer[start : start + self.header(L.H_FAMILIES)]

    def channel(self, channel: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Offsets and items of a channel (`layout.CHANNEL_*`), int32; logprobs as bit patterns."""
        items = (self.token_ids, self.logprobs.view(np.int32), self.families)
        return self.column(L.R_TOKEN_INDPTR + channel), items[channel]

    def spec(self, field: int) -> NDArray[np.int32]:
        """Speculative counter `field` (`layout.SPEC_*`) of every row, int32 `[rows]`."""
        start = self.geometry.column(L.ROW_WIDTH + field)
        return self.buffer[start : start + self.rows]

    def release(self) -> None:
        """Give the buffer back for a later step. Releasing twice is harmless."""
        buffer = self._buffer
        if buffer is None:
            return
        self._buffer = self._header = None
        if self._on_release is not None:
            self._on_release(buffer)

    def drop_rows(self, unwanted: NDArray[np.bool_]) -> None:
        """Take out the rows where `unwanted`, bool `[rows]`, is true; the rest moves up, in order."""
        kept = ~unwanted
        rows = int(kept.sum())
        buffer, geometry = self.buffer, self.geometry
        for field, items, start in (
            (L.R_TOKEN_INDPTR, self.token_ids, geometry.tokens),
            (L.R_LOGPROB_INDPTR, self.logprobs.view(np.int32), geometry.logprobs),
            (L.R_FAMILIES_INDPTR, self.families, geometry.families),
        ):
            indptr = self.column(field)
            lengths = np.diff(indptr)
            chosen = items[np.repeat(kept, lengths)]
            buffer[start : start + len(chosen)] = chosen
            indptr[1 : 1 + rows] = np.cumsum(lengths[kept])
        for column in [*map(self.column, range(L.R_TOKEN_INDPTR)), *map(self.spec, range(self.spec_width))]:
            column[:rows] = column[kept]
        flags = self.column(L.R_FLAGS)[:rows]
        buffer[L.H_ROWS] = rows
        buffer[L.H_TOKENS] = buffer[geometry.column(L.R_TOKEN_INDPTR) + rows]
        buffer[L.H_LOGPROBS] = buffer[geometry.column(L.R_LOGPROB_INDPTR) + rows]
        buffer[L.H_FAMILIES] = buffer[geometry.column(L.R_FAMILIES_INDPTR) + rows]
        buffer[L.H_CONVEYED] = np.count_nonzero(flags & L.ROW_CONVEYED)
        buffer[L.H_FINISHED] = np.count_nonzero(flags & L.ROW_FINAL)
        buffer[L.H_EARLY] = np.count_nonzero(flags & L.ROW_EARLY)
        self._header = None
