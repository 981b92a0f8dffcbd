"""The decisions of SPEC.md section 2 for one request: slot, finish, whether it sends. Compiled into `loop.py`."""

from __future__ import annotations

from numba import int64

from gpupack.core import layout as L
from gpupack.core.jit import inlined

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@inlined
def live_slot(state, handle):
    """Slot of a handle, or -1 if the handle has ended, was never given or is padding."""
    slot = handle & 0xFFFFFFFF
    generation = handle >> L.SLOT_BITS
    if handle < 0 or slot >= state.shape[0]:
        return -1
    if state[slot, L.GENERATION] != generation or not state[slot, L.FLAGS] & L.STATE_LIVE:
        return -1
    return slot


@inlined
def as_int32(token):
    """A token id in 32 bits; one that does not fit stays out of every vocabulary."""
    return min(max(token, INT32_MIN), INT32_MAX)


@inlined
def find_finish(state, slot, flags, old_len, accept, token_ids, start, vocab_size):
    """Finish within the newly accepted run: (code, finished_len, match).

    In this order: an id outside the vocabulary, which is not part of the output; a stop id, which is;
    the length. Tokens beyond the cap are not output, so what stands there counts as length.
    """
    cap = int64(state[slot, L.MAX_NEW_TOKENS])
    stops = (flags >> L.STOP_COUNT_SHIFT) & L.STOP_COUNT_MASK
    stop_len, stop_id = int64(-1), int64(0)
    for j in range(min(accept, cap - old_len)):
        token = token_ids[start + j]
        if token < 0 or token >= vocab_size:
            return L.FINISH_INVALID_TOKEN, old_len + j, as_int32(token)
        if stop_len < 0:
            for k in range(stops):
                if token == state[slot, L.STOP_0 + k]:
                    stop_len, stop_id = old_len + j + 1, int64(token)
    if stop_len >= 0:
        return L.FINISH_STOP_TOKEN, stop_len, stop_id
    if accept > 0 and old_len + accept >= cap:
        return L.FINISH_LENGTH, cap, cap
    return L.FINISH_NONE, int64(-1), int64(0)


@inlined
def is_due(flags, visible, cursor, interval, policy):
    """The interval rule of a running request; the hold is looked at by the caller, and only if due."""
    unsent = visible - cursor
    if flags & L.STATE_STREAM:
        if policy & L.POLICY_STREAM_UNSENT:
            due = interval == 1 or unsent >= interval or (cursor == 0 and unsent > 0)
        else:
            due = interval == 1 or visible % interval == 1
    else:
        due = unsent >= interval if policy & L.POLICY_FORCE_UNSENT else visible % interval == 0
        if policy & L.POLICY_FIRST_TOKEN_FLUSH and cursor == 0 and unsent > 0:
            due = True
    if policy & L.POLICY_SKIP_EMPTY and unsent <= 0:
        due = False
    return due


@inlined
def finish_of(state, slot, flags, old_len, accept, token_ids, start, vocab_size, control, i):
    """Finish of a request that ran until now: (code, finished_len, match).

    What the host asks goes first. It may leave open where the output ends: then at the finish that the
    run itself has, else at its last token.
    """
    code, end, match = L.FINISH_NONE, int64(-1), int64(0)
    if flags & L.STATE_JUDGED:
        code, end, match = find_finish(state, slot, flags, old_len, accept, token_ids, start, vocab_size)
    if control.shape[1] and control[L.CONTROL_FLAGS_ROW, i] & L.CONTROL_FINISH:
        wanted = int64(control[L.CONTROL_FINISHED_LEN, i])
        if wanted >= 0:
            end = wanted
        elif code == L.FINISH_NONE:
            end = old_len + accept
        code = int64(control[L.CONTROL_FINISH_CODE, i])
        match = int64(control[L.CONTROL_MATCH, i])
    return code, end, match


@inlined
def is_usual(state, slot, flags, token, mode, vocab_size):
    """Whether a row of one new token is the one that most rows of most steps are, if the host asks nothing of it.

    It streams every token, has nothing unsent, and does not end with its one new token: whatever the policy,
    that token and its logprob go out, and nothing else changes.
    """
    apart = L.STATE_CONVEYED | L.STATE_FINISHED | L.STATE_FINAL_SENT
    if flags & (apart | L.STATE_STREAM) != L.STATE_STREAM or state[slot, L.INTERVAL] != 1:
        return False
    length = state[slot, L.OUTPUT_LEN]
    if state[slot, L.TOKEN_CURSOR] != length:
        return False
    if flags & L.STATE_LOGPROBS and (state[slot, L.LOGPROB_CURSOR] != length or not mode & L.MODE_LOGPROBS):
        return False
    if flags & L.STATE_JUDGED:
        if token < 0 or token >= vocab_size or length + 1 >= state[slot, L.MAX_NEW_TOKENS]:
            return False
        for k in range((flags >> L.STOP_COUNT_SHIFT) & L.STOP_COUNT_MASK):
            if token == state[slot, L.STOP_0 + k]:
                return False
    return True


@inlined
def send_of(state, slot, flags, asked, visible, cursor, policy):
    """Whether a running request sends, and whether it is due and held: (sends, held)."""
    sends = is_due(flags, visible, cursor, state[slot, L.INTERVAL], policy)
    if asked & L.CONTROL_FLUSH and visible > cursor:
        sends = True
    may_hold = flags & L.STATE_STREAM or policy & L.POLICY_HOLD_FORCED
    if sends and asked & L.CONTROL_HOLD and may_hold:
        return False, True
    return sends, False
