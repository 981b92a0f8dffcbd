"""Who sends and from where to where, for requests whose items stay in the engine's own lists.

The rule is that of `rule.py`. Lengths come from the engine, whole, so nothing is appended and no ring is
kept: what is left of the CPU backend's loop are the cursors. Compiled by Numba.
"""

from __future__ import annotations

from numba import boolean, int32, int64, uint8

from gpupack.backends.cpu.emit_rule import is_due
from gpupack.core import layout as L
from gpupack.core.jit import MATRIX32, VECTOR32, compiled

# By slot, one row of words each.
FLAGS, INTERVAL, TOKEN_CURSOR, LOGPROB_CURSOR, OPENED = range(5)
CURSOR_WIDTH = 5
ASK_HOLD = 1 << 30  # beside STATE_STREAM and STATE_LOGPROBS: stop strings may hold it

# What a row does.
NOTHING, SENDS, ASKS = range(3)
"""ASKS: due, and the host must say whether its stop strings hold it."""

RUNNING, LATE = -1, -2
"""In place of a finished request's visible length: it runs; its final row has gone out."""

BATCH_INDEX, SLOT, TOKEN_BEGIN, TOKEN_END, LOGPROB_BEGIN, LOGPROB_END, FIRST = range(7)
ROW_WIDTH = 7

# What `advance` says of all rows together.
TOKENS, ONE_TOKEN, ONE_LOGPROB, BACKLOG = range(4)
"""Tokens in the rows; whether each row is the last id of its list and no more, as after a decode step; whether
each has one logprob; whether one has logprobs of tokens that were sent before."""
FACTS = 4


@compiled(int64(MATRIX32, VECTOR32, VECTOR32, VECTOR32, int64, int64, int64, int64, uint8[::1]))
def find_due(cursors, slots, lens, ends, skipped, interval, force_interval, policy, actions):
    """Say for each row of a batch what it does; returns how many ask. `skipped` is a row or -1."""
    asks = 0
    for i in range(slots.shape[0]):
        actions[i] = NOTHING
        if i == skipped or ends[i] == LATE:
            continue
        if ends[i] != RUNNING:
            actions[i] = SENDS
            continue
        slot = slots[i]
        flags = cursors[slot, FLAGS]
        every = cursors[slot, INTERVAL]
        if every == 0:
            every = interval if flags & L.STATE_STREAM else force_interval
        if is_due(flags, int64(lens[i]), int64(cursors[slot, TOKEN_CURSOR]), int64(every), policy):
            asked = flags & ASK_HOLD and flags & L.STATE_STREAM
            actions[i] = ASKS if asked else SENDS
            asks += asked != 0
    return asks


@compiled(
    int64(MATRIX32, VECTOR32, VECTOR32, VECTOR32, uint8[::1], uint8[::1], boolean, int64, int32[:, ::1], int64[::1]),
)
def advance(cursors, slots, lens, ends, actions, retracted, scores, policy, rows, facts):
    """Write the rows that send and move their cursors; returns how many. `scores`: logprobs go with this batch."""
    count, tokens, one_token, one_logprob, backlog = 0, 0, True, scores, False
    for i in range(slots.shape[0]):
        if actions[i] != SENDS:
            continue
        slot = slots[i]
        end = lens[i] if ends[i] == RUNNING else ends[i]
        rows[BATCH_INDEX, count] = i
        rows[SLOT, count] = slot
        rows[TOKEN_BEGIN, count] = cursors[slot, TOKEN_CURSOR]
        rows[TOKEN_END, count] = end
        rows[FIRST, count] = cursors[slot, OPENED] == 0
        tokens += max(end - cursors[slot, TOKEN_CURSOR], 0)
        one_token &= end == cursors[slot, TOKEN_CURSOR] + 1 and end == lens[i]
        cursors[slot, TOKEN_CURSOR] = end
        cursors[slot, OPENED] = 1
        if scores and cursors[slot, FLAGS] & L.STATE_LOGPROBS:
            if not (retracted.shape[0] and retracted[i] and policy & L.POLICY_RETRACTED_LOGPROBS):
                end = max(end, 1)
            rows[LOGPROB_BEGIN, count] = cursors[slot, LOGPROB_CURSOR]
            rows[LOGPROB_END, count] = end
            one_logprob &= end == cursors[slot, LOGPROB_CURSOR] + 1
            backlog |= cursors[slot, LOGPROB_CURSOR] < rows[TOKEN_BEGIN, count]
            cursors[slot, LOGPROB_CURSOR] = end
        else:
            one_logprob = False
        count += 1
    facts[TOKENS], facts[ONE_TOKEN], facts[ONE_LOGPROB], facts[BACKLOG] = tokens, one_token, one_logprob, backlog
    return count
