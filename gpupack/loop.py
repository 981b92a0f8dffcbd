"""The rule of SPEC.md section 2 as one loop over the batch, compiled by Numba.

This is the reference for speed and meaning: the CPU backend and the host gate run it, and the Triton
kernel must equal it bit for bit. Logprobs pass through as int32 bit patterns. Everything is compiled
when this module is imported, or loaded from Numba's cache, so that nothing compiles in a serving loop.
"""

from __future__ import annotations

from numba import int32, int64, njit, void

from gpupack import layout as L

# Helpers are inlined and arrays are not reference-counted: with an atomic increment for each array that a
# helper takes, the loop takes nearly twice as long.
COMPILED = {"cache": True, "nogil": True, "_nrt": False}
inlined = njit(nogil=True, forceinline=True, _nrt=False)

VECTOR32, VECTOR64 = int32[::1], int64[::1]
MATRIX32 = int32[:, ::1]

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
def gather(ring, slot, begin, end, old_len, source, start, out, at):
    """Copy output items [begin, end) to out[at:]; returns where the next go.

    The ring holds those before old_len, the run the rest. One new item is the common case, and a loop
    over one item costs more than all else here.
    """
    if begin == old_len and end == old_len + 1:
        out[at] = as_int32(source[start])
        return at + 1
    mask = ring.shape[1] - 1
    for position in range(begin, min(end, old_len)):
        out[at] = ring[slot, position & mask]
        at += 1
    for position in range(max(begin, old_len), end):
        out[at] = as_int32(source[start + position - old_len])
        at += 1
    return at


@inlined
def keep(ring, slot, begin, end, old_len, source, start):
    """Keep the items of the run from output position `begin` on in the ring: they are unsent."""
    if begin >= end:
        return
    mask = ring.shape[1] - 1
    for position in range(max(begin, old_len), end):
        ring[slot, position & mask] = as_int32(source[start + position - old_len])


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
def send_of(state, slot, flags, asked, visible, cursor, policy):
    """Whether a running request sends, and whether it is due and held: (sends, held)."""
    sends = is_due(flags, visible, cursor, state[slot, L.INTERVAL], policy)
    if asked & L.CONTROL_FLUSH and visible > cursor:
        sends = True
    may_hold = flags & L.STATE_STREAM or policy & L.POLICY_HOLD_FORCED
    if sends and asked & L.CONTROL_HOLD and may_hold:
        return False, True
    return sends, False


@inlined
def put_row(out, stride, row, index, slot, generation, flags, visible, match, token_start, logprob_start):
    """Write the columns of one row, the two indptr aside."""
    at = L.HEADER_WORDS + row
    out[at + L.R_BATCH_INDEX * stride] = index
    out[at + L.R_SLOT * stride] = slot
    out[at + L.R_GENERATION * stride] = generation
    out[at + L.R_FLAGS * stride] = flags
    out[at + L.R_VISIBLE_LEN * stride] = visible
    out[at + L.R_MATCH * stride] = match
    out[at + L.R_TOKEN_START * stride] = token_start
    out[at + L.R_LOGPROB_START * stride] = logprob_start


@inlined
def end_row(out, stride, row, tokens, scores):
    """Write where the items of row `row` end; returns the number of rows."""
    out[L.HEADER_WORDS + L.R_TOKEN_INDPTR * stride + row + 1] = tokens
    out[L.HEADER_WORDS + L.R_LOGPROB_INDPTR * stride + row + 1] = scores
    return row + 1


def _pack_batch(
    state, token_ring, logprob_ring, handles, accept_lens, token_ids, token_starts, logprobs, logprob_starts,
    control, out, stride, token_base, logprob_base, mode, policy, backlog_limit, vocab_size, launch,
):  # fmt: skip
    rows = tokens = scores = 0
    out[: L.HEADER_WORDS] = 0
    end_row(out, stride, -1, 0, 0)

    for i in range(handles.shape[0]):
        slot = live_slot(state, handles[i])
        if slot < 0:
            out[L.H_STALE] += handles[i] != L.PADDING_HANDLE
            continue
        asked = control[L.CONTROL_FLAGS_ROW, i] if control.shape[1] else 0
        if asked & L.CONTROL_SKIP:
            continue
        flags = state[slot, L.FLAGS]
        generation = state[slot, L.GENERATION]
        accept = int64(accept_lens[i]) if mode & L.MODE_APPEND else 0
        start, score_start = token_starts[i], logprob_starts[i]
        has_scores = flags & L.STATE_LOGPROBS
        token_at, score_at = token_base + tokens, logprob_base + scores

        # Host-judged: the run is passed on as it is.
        if flags & L.STATE_CONVEYED:
            put_row(out, stride, rows, i, slot, generation, L.ROW_CONVEYED, accept, 0, 0, 0)
            tokens = gather(token_ring, slot, 0, accept, 0, token_ids, start, out, token_at) - token_base
            if has_scores:
                scores = gather(logprob_ring, slot, 0, accept, 0, logprobs, score_start, out, score_at) - logprob_base
            rows = end_row(out, stride, rows, tokens, scores)
            out[L.H_CONVEYED] += 1
            continue

        # The final row has gone out: with the overlap schedule a finished request comes by once more.
        if flags & L.STATE_FINAL_SENT:
            out[L.H_LATE] += accept > 0
            continue

        # Take in the run and see whether it ends; nothing counts behind a finish that is known already.
        old_len = int64(state[slot, L.OUTPUT_LEN])
        finished = (flags & L.STATE_FINISHED) != 0
        if finished:
            accept = 0
            visible, match = int64(state[slot, L.FINISHED_LEN]), int64(state[slot, L.MATCH])
        else:
            code, visible, match = finish_of(
                state, slot, flags, old_len, accept, token_ids, start, vocab_size, control, i
            )
            finished = code != L.FINISH_NONE
            flags |= (code << L.CODE_SHIFT) | (L.STATE_FINISHED if finished else 0)
        new_len = old_len + accept
        if not finished:
            visible = new_len
            if control.shape[1] and control[L.CONTROL_VISIBLE_LEN, i] >= 0:
                visible = min(new_len, int64(control[L.CONTROL_VISIBLE_LEN, i]))

        # Who sends: a finish once; else who is due and not held; else who would overrun its window.
        cursor, score_cursor = int64(state[slot, L.TOKEN_CURSOR]), int64(state[slot, L.LOGPROB_CURSOR])
        over = new_len - cursor > backlog_limit or (has_scores != 0 and new_len - score_cursor > backlog_limit)
        sends = finished and mode & L.MODE_PACK != 0
        if not finished and mode & L.MODE_PACK:
            sends, held = send_of(state, slot, flags, asked, visible, cursor, policy)
            out[L.H_HELD] += held
        early = over and not sends

        # The row: tokens from the cursor to the visible length, logprobs from a cursor of their own.
        if sends or early:
            row_flags = ((flags >> L.CODE_SHIFT) & L.CODE_MASK) << L.ROW_CODE_SHIFT
            row_flags |= (L.ROW_FINAL if finished else 0) | (L.ROW_EARLY if early else 0)
            row_match = match if finished else 0
            put_row(out, stride, rows, i, slot, generation, row_flags, visible, row_match, cursor, score_cursor)
            tokens = gather(token_ring, slot, cursor, visible, old_len, token_ids, start, out, token_at) - token_base
            cursor = max(cursor, visible)
            if has_scores and (over or mode & L.MODE_LOGPROBS):
                end = max(visible, 1)
                exist = min(end, new_len)
                scores = gather(
                    logprob_ring, slot, score_cursor, exist, old_len, logprobs, score_start, out, score_at
                ) - logprob_base  # fmt: skip
                score_cursor = max(score_cursor, exist if policy & L.POLICY_LOGPROB_EXISTING else end)
            rows = end_row(out, stride, rows, tokens, scores)
            out[L.H_EARLY] += early
            out[L.H_FINISHED] += finished
            flags |= L.STATE_FINAL_SENT if finished else 0

        # What was not sent stays in the rings; state is written last.
        if not flags & L.STATE_FINAL_SENT:
            keep(token_ring, slot, cursor, new_len, old_len, token_ids, start)
            if has_scores:
                keep(logprob_ring, slot, score_cursor, new_len, old_len, logprobs, score_start)
        state[slot, L.FLAGS] = flags
        state[slot, L.OUTPUT_LEN] = new_len
        state[slot, L.TOKEN_CURSOR] = cursor
        state[slot, L.LOGPROB_CURSOR] = score_cursor
        if finished:
            state[slot, L.FINISHED_LEN] = visible
            state[slot, L.MATCH] = match

    out[L.H_LAUNCH], out[L.H_BATCH], out[L.H_ROWS] = launch, handles.shape[0], rows
    out[L.H_TOKENS], out[L.H_LOGPROBS] = tokens, scores


def _pack_signature(token):
    return void(
        MATRIX32, MATRIX32, MATRIX32, VECTOR64, VECTOR32, token[::1], VECTOR64, VECTOR32, VECTOR64,
        MATRIX32, VECTOR32, int64, int64, int64, int64, int64, int64, int64, int64,
    )  # fmt: skip


pack_batch = njit([_pack_signature(int32), _pack_signature(int64)], **COMPILED)(_pack_batch)
