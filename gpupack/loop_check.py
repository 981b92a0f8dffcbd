"""Checks of a batch's inputs before anything is changed, as one loop compiled by Numba."""

from __future__ import annotations

from numba import boolean, int64, njit, types

from gpupack import layout as L
from gpupack.compiled import COMPILED, MATRIX32, VECTOR32, VECTOR64
from gpupack.control import CONTROL_BITS, HOLD_AND_FLUSH
from gpupack.rule import live_slot

# What can be wrong; the row comes with it.
(
    OK,
    BAD_ACCEPT_LEN,
    DOUBLED,
    BAD_CONTROL,
    BAD_FINISH_CODE,
    BAD_FINISHED_LEN,
    BAD_VISIBLE_LEN,
    NO_LOGPROBS,
    NO_TOP_LOGPROBS,
    NO_IDS_LOGPROBS,
    BAD_BLOCK_LEN,
    BAD_CAP_LEN,
) = range(12)


def _check_batch(
    state, handles, accept_lens, control, seen, mode, max_accept, backlog_limit, family_limit, has_logprobs, launch,
    top_width, ids_width, block_accept_lens, cap_lens, most_cap,
):  # fmt: skip
    """What is wrong with the inputs, before anything is changed: (OK, 0) or (cause, row)."""
    for i in range(handles.shape[0]):
        slot = live_slot(state, handles[i])
        if slot < 0:
            continue
        if seen[slot] == launch:
            return DOUBLED, i
        seen[slot] = launch
        asked = control[L.CONTROL_FLAGS_ROW, i] if control.shape[1] else 0
        if asked & ~CONTROL_BITS or asked & HOLD_AND_FLUSH == HOLD_AND_FLUSH:
            return BAD_CONTROL, i
        if asked & L.CONTROL_SKIP:
            continue
        accept = int64(accept_lens[i]) if mode & L.MODE_APPEND else 0
        if accept < 0 or accept > max_accept:
            return BAD_ACCEPT_LEN, i
        if accept and state[slot, L.FLAGS] & L.STATE_LOGPROBS:
            if not has_logprobs:
                return NO_LOGPROBS, i
            if state[slot, L.WIDTHS] & L.TOP_WIDTH_MASK > top_width:
                return NO_TOP_LOGPROBS, i
            if state[slot, L.WIDTHS] >> L.IDS_WIDTH_SHIFT > ids_width:
                return NO_IDS_LOGPROBS, i
        if mode & L.MODE_VERIFY and block_accept_lens.shape[0] and block_accept_lens[i] < 0:
            return BAD_BLOCK_LEN, i
        if mode & L.MODE_VERIFY and cap_lens.shape[0] and (cap_lens[i] < 0 or cap_lens[i] > most_cap):
            return BAD_CAP_LEN, i
        if control.shape[1] == 0 or state[slot, L.FLAGS] & L.STATE_FINISHED:
            continue
        # The cursors of a conveyed request are the gate's, which checks what concerns them.
        conveyed = state[slot, L.FLAGS] & L.STATE_CONVEYED
        new_len = state[slot, L.OUTPUT_LEN] + accept
        if asked & L.CONTROL_FINISH:
            code = control[L.CONTROL_FINISH_CODE, i]
            if code <= L.FINISH_NONE or code > L.FINISH_HOST:
                return BAD_FINISH_CODE, i
            end = control[L.CONTROL_FINISHED_LEN, i]
            if end < -1 or (end > new_len and not conveyed):
                return BAD_FINISHED_LEN, i
        visible = control[L.CONTROL_VISIBLE_LEN, i]
        shown = max(state[slot, L.TOKEN_CURSOR], visible)
        if state[slot, L.FLAGS] & L.STATE_LOGPROBS:  # their backlog may be longer
            shown = min(shown, max(state[slot, L.LOGPROB_CURSOR], visible))
        # Records have a window of their own.
        limit = min(backlog_limit, family_limit) if state[slot, L.WIDTHS] else backlog_limit
        if visible < -1 or (visible >= 0 and new_len - shown > limit and not conveyed):
            return BAD_VISIBLE_LEN, i
    return OK, 0


check_batch = njit(
    types.Tuple((int64, int64))(
        MATRIX32, VECTOR64, VECTOR32, MATRIX32, VECTOR64, int64, int64, int64, int64, boolean, int64, int64, int64,
        VECTOR32, VECTOR32, int64,
    ),
    **COMPILED,
)(_check_batch)  # fmt: skip
