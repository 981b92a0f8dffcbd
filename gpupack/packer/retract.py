"""Where a request stands that a packer judges: what was committed, what was sent, what is unsent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.base import Backend, Launched
from gpupack.backends.slot_state import family_width
from gpupack.core import layout as L
from gpupack.core.errors import InputError
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Resume

Rows = list[tuple[PackedStep, int]]  # packed steps and the row of one request in each


def where_it_stands(
    backend: Backend, in_flight: Sequence[Launched], slot: int, handle: int, output_len: int | None
) -> Resume:
    """The Resume of a live handle, see `Packer.retract`; nothing is changed. Waits for the steps in flight."""
    state = backend.state_row(slot)
    if state[L.FLAGS] & L.STATE_CONVEYED:
        raise InputError(f"handle: {handle} is host-judged, its cursors are the gate's: OutputStreamer.retract")
    launched_len = int(state[L.OUTPUT_LEN])
    if output_len is None:
        if in_flight:
            raise InputError(f"output_len: expected, {len(in_flight)} steps are in flight, got None")
        output_len = launched_len
    rows = _rows_in_flight(in_flight, handle)
    tokens, scores = (int(state[L.TOKEN_CURSOR]), int(state[L.LOGPROB_CURSOR]))
    if rows:
        packed, row = rows[0]
        tokens, scores = (int(packed.column(field)[row]) for field in (L.R_TOKEN_START, L.R_LOGPROB_START))
    elif state[L.FLAGS] & L.STATE_FINAL_SENT:
        raise InputError(f"handle: expected a running request, {handle} has sent its final row; retire it")
    if not rows and state[L.FLAGS] & L.STATE_FINISHED and output_len > _before_finish(state):
        raise InputError(f"handle: expected a running request, {handle} has finished; pack sends its final row")
    if not tokens <= output_len <= launched_len:
        raise InputError(f"output_len: expected {tokens} to {launched_len}, got {output_len}")
    unsent = Unsent(backend, slot, rows)
    scores_end = output_len if state[L.FLAGS] & L.STATE_LOGPROBS else scores
    return Resume(
        output_len=output_len,
        token_cursor=tokens,
        logprob_cursor=scores,
        unsent_tokens=unsent.items(tokens, output_len),
        unsent_logprobs=unsent.items(scores, scores_end, L.CHANNEL_LOGPROBS).view(np.float32),
        unsent_families=unsent.items(scores, scores_end, L.CHANNEL_FAMILIES, family_width(int(state[L.WIDTHS]))),
        spec_counts=backend.spec_row(slot),
    )


def _before_finish(state: NDArray[np.int32]) -> int:
    """Tokens in front of the one that ended the output; an invalid id is no part of it."""
    code = (int(state[L.FLAGS]) >> L.CODE_SHIFT) & L.CODE_MASK
    return max(int(state[L.FINISHED_LEN]) - (code != L.FINISH_INVALID_TOKEN), 0)


def _rows_in_flight(in_flight: Sequence[Launched], handle: int) -> Rows:
    """The rows of this handle that were launched and not taken in, in order."""
    steps = [launched.result() for launched in in_flight]
    return [(packed, int(row)) for packed in steps for row in np.flatnonzero(packed.handles == handle)]


class Unsent:
    """The items of a slot that no step taken in has sent: in rows in flight, behind them in the ring."""

    def __init__(self, backend: Backend, slot: int, rows: Rows) -> None:
        self._backend, self._slot, self._rows = backend, slot, rows

    def items(self, begin: int, end: int, channel: int = L.CHANNEL_TOKENS, width: int = 1) -> NDArray[np.int32]:
        """Output items [begin, end) of `width` words, int32."""
        parts = [np.empty(0, np.int32)]
        for packed, row in self._rows if width else []:
            indptr, items = packed.channel(channel)
            part = items[indptr[row] : indptr[row + 1]]
            if channel == L.CHANNEL_TOKENS and packed.column(L.R_FLAGS)[row] & L.ROW_HIDDEN_TOKEN:
                part = part[:0]  # it is not output yet
            part = part[: max(end - begin, 0) * width]
            parts.append(part.copy())
            begin += len(part) // width
        if begin < end and width:
            parts.append(self._backend.unsent(self._slot, begin, end, channel))
        return np.concatenate(parts)
