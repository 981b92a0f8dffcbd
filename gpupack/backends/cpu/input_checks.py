"""Checks of a batch's inputs before anything is changed, as one loop compiled by Numba."""

from __future__ import annotations

from numba import int64

from gpupack.backends.cpu.decode_fast_path import OTHER, kind_of
from gpupack.backends.cpu.emit_rule import live_slot
from gpupack.backends.cpu.extra_logprobs import BLOCK_ACCEPT, CAP_LENS, IDS_WIDTH, STRIDES, TOP_WIDTH, counts_nothing
from gpupack.core import layout as L
from gpupack.core.jit import called
from gpupack.core.row_control import CONTROL_BITS, HOLD_AND_FLUSH

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


# What of a configuration bounds a step, int64 `[6]`; LIMIT_RUN: rows of a run from which on it is packed as one.
LIMIT_POLICY, LIMIT_VOCAB, LIMIT_BACKLOG, LIMIT_FAMILIES, LIMIT_CAP, LIMIT_RUN = range(6)
LIMITS = 6


@called
def check_batch(
    state, optional, handles, accept_lens, token_ids, token_starts, control, limits, mode, kinds, seen, check,
    max_accept, has_logprobs,
):  # fmt: skip
    """What is wrong with the inputs, before anything is changed: (OK, 0) or (cause, row).

    `seen` int64 `[capacity]` has the number of the newest check, `check`, by slot; `kinds` uint8 `[B]`, those of
    `loop_runs`, is written.
    """
    plain = mode & L.MODE_APPEND != 0
    if optional is not None:
        plain = plain and counts_nothing(optional)
    backlog_limit, family_limit = limits[LIMIT_BACKLOG], limits[LIMIT_FAMILIES]
    for i in range(handles.shape[0]):
        kinds[i] = OTHER
        slot = live_slot(state, handles[i])
        if slot < 0:
            continue
        if seen[slot] == check:
            return DOUBLED, i
        seen[slot] = check
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
            if optional is not None:
                if state[slot, L.WIDTHS] & L.TOP_WIDTH_MASK > optional[STRIDES][TOP_WIDTH]:
                    return NO_TOP_LOGPROBS, i
                if state[slot, L.WIDTHS] >> L.IDS_WIDTH_SHIFT > optional[STRIDES][IDS_WIDTH]:
                    return NO_IDS_LOGPROBS, i
        if optional is not None and mode & L.MODE_VERIFY:
            block, cap = optional[BLOCK_ACCEPT], optional[CAP_LENS]
            if block.shape[0] and block[i] < 0:
                return BAD_BLOCK_LEN, i
            if cap.shape[0] and (cap[i] < 0 or cap[i] > limits[LIMIT_CAP]):
                return BAD_CAP_LEN, i
        if plain and (control.shape[1] == 0 or (asked == 0 and control[L.CONTROL_VISIBLE_LEN, i] < 0)):
            token = token_ids[token_starts[i]] if accept else 0
            kinds[i] = kind_of(state, slot, state[slot, L.FLAGS], accept, token, mode, limits[LIMIT_VOCAB])
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
