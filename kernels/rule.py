"""Finish and interval rule for a block of the batch; equal to `gpupack/backends/cpu/emit_rule.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from gpupack.kernels import constants as C

INT32_MIN = tl.constexpr(-(2**31))
INT32_MAX = tl.constexpr(2**31 - 1)
NOWHERE = tl.constexpr(2**30)  # no position of a run
SECTOR = tl.constexpr(8)  # words that memory moves at a time: half of a state row, a piece of a ring


@triton.jit
def state_half(arena_ptr, slot, FIRST: tl.constexpr, mask_slot):
    """Words FIRST to FIRST + SECTOR of state rows, `[BLOCK, SECTOR]`; 0 where there is none."""
    offs = slot[:, None] * C.STATE_WIDTH + FIRST + tl.arange(0, SECTOR)[None, :]
    return tl.load(arena_ptr + offs, mask=mask_slot[:, None], other=0)


@triton.jit
def field(half, FIELD: tl.constexpr):
    """State word FIELD, `[BLOCK]`, of the half of the rows that it is in."""
    columns = tl.arange(0, SECTOR)[None, :]
    return tl.sum(tl.where(columns == FIELD % SECTOR, half, 0), axis=1)


@triton.jit
def rows_if(bits, offs_row, batch):
    """The rows of the batch, `[BLOCK]` int1, or none if `bits` is 0 (a scalar int1 is no mask in the interpreter)."""
    return offs_row < tl.where(bits != 0, batch, 0)


@triton.jit
def find_finish(cap, cold, flags, old_len, accept, run, VOCAB_SIZE: tl.constexpr, ACCEPT: tl.constexpr):
    """Finish within the run `[BLOCK, ACCEPT]`: (code, finished_len, match), `[BLOCK]` each. SPEC.md 2, finish."""
    place = tl.arange(0, ACCEPT)[None, :]
    within = place < tl.minimum(accept, cap - old_len)[:, None]
    invalid = within & ((run < 0) | (run >= VOCAB_SIZE))
    bad_at = tl.min(tl.where(invalid, place, NOWHERE), axis=1)
    columns = SECTOR + tl.arange(0, SECTOR)[None, :]
    is_id = (columns >= C.STOP_0) & (columns < C.STOP_0 + ((flags >> C.STOP_COUNT_SHIFT) & C.STOP_COUNT_MASK)[:, None])
    ids = tl.where(is_id, cold, -1)  # what meets -1 is outside the vocabulary, and that goes first
    if ACCEPT == 1:  # all ids at once; with longer runs that would take too many registers
        is_stop = (tl.max((run == ids).to(tl.int32), axis=1) != 0)[:, None]
    else:
        is_stop = run == field(ids, C.STOP_0)[:, None]
        for k in tl.static_range(1, C.MAX_STOP_IDS):
            is_stop = is_stop | (run == field(ids, C.STOP_0 + k)[:, None])
    is_stop = is_stop & within
    stop_at = tl.min(tl.where(is_stop, place, NOWHERE), axis=1)
    bad, stop = bad_at < NOWHERE, stop_at < NOWHERE
    full = (accept > 0) & (old_len + accept >= cap)
    at = tl.where(bad, bad_at, stop_at)
    token = tl.sum(tl.where(place == at[:, None], run, 0), axis=1)
    code = tl.where(full, C.FINISH_LENGTH, C.FINISH_NONE)
    code = tl.where(bad, C.FINISH_INVALID_TOKEN, tl.where(stop, C.FINISH_STOP_TOKEN, code))
    end = tl.where(bad, old_len + bad_at, tl.where(stop, old_len + stop_at + 1, tl.where(full, cap, -1)))
    match = tl.where(bad | stop, token, tl.where(full, cap, 0))
    return code, end, match


@triton.jit
def is_due(flags, visible, cursor, interval, POLICY: tl.constexpr):
    """The interval rule of running requests, `[BLOCK]` int1. SPEC.md section 2, points 4 and 5."""
    unsent = visible - cursor
    interval = tl.maximum(interval, 1)  # that of a slot without a request is 0
    if C.POLICY_STREAM_UNSENT & POLICY:
        stream_due = (unsent >= interval) | ((cursor == 0) & (unsent > 0))
    else:
        stream_due = visible % interval == 1
    if C.POLICY_FORCE_UNSENT & POLICY:
        force_due = unsent >= interval
    else:
        force_due = visible % interval == 0
    if C.POLICY_FIRST_TOKEN_FLUSH & POLICY:
        force_due = force_due | ((cursor == 0) & (unsent > 0))
    due = tl.where((flags & C.STATE_STREAM) != 0, (interval == 1) | stream_due, force_due)
    if C.POLICY_SKIP_EMPTY & POLICY:
        due = due & (unsent > 0)
    return due
