"""The rule of SPEC.md section 2 as one loop over the batch, compiled by Numba.

This is the reference for speed and meaning: the CPU backend and the host gate run it, and the Triton
kernel must equal it bit for bit. Logprobs pass through as int32 bit patterns. Everything is compiled
when this module is imported, or loaded from Numba's cache, so that nothing compiles in a serving loop.
"""

from __future__ import annotations

from numba import boolean, int32, int64, types, uint8

from gpupack.backends.cpu import extra_logprobs as loop_optional
from gpupack.backends.cpu.decode_fast_path import CONVEYED, put_run, run_end
from gpupack.backends.cpu.emit_rule import as_int32, finish_of, live_slot, send_of
from gpupack.backends.cpu.input_checks import (
    LIMIT_BACKLOG,
    LIMIT_FAMILIES,
    LIMIT_POLICY,
    LIMIT_RUN,
    LIMIT_VOCAB,
    OK,
    check_batch,
)
from gpupack.core import layout as L
from gpupack.core.jit import MATRIX32, PLACES, VECTOR32, VECTOR64, called, compiled, inlined


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
def put_row(out, stride, row, index, slot, generation, flags, visible, match, token_start, logprob_start):
    """Write the columns of one row, the indptr aside."""
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
def end_row(out, stride, row, tokens, scores, families):
    """Write where the items of row `row` end; returns the number of rows."""
    out[L.HEADER_WORDS + L.R_TOKEN_INDPTR * stride + row + 1] = tokens
    out[L.HEADER_WORDS + L.R_LOGPROB_INDPTR * stride + row + 1] = scores
    out[L.HEADER_WORDS + L.R_FAMILIES_INDPTR * stride + row + 1] = families
    return row + 1


@called
def pack_batch(
    state, token_ring, logprob_ring, optional, handles, accept_lens, token_ids, token_starts, logprobs, logprob_starts,
    control, out, places, limits, mode, launch, kinds,
):  # fmt: skip
    """Pack a batch; `kinds` uint8 `[B]` as `loop_check` writes them, or all OTHER."""
    stride, token_base, logprob_base, family_base = places
    policy, vocab_size = limits[LIMIT_POLICY], limits[LIMIT_VOCAB]
    backlog_limit, family_limit = limits[LIMIT_BACKLOG], limits[LIMIT_FAMILIES]
    least_run = max(limits[LIMIT_RUN], 1)
    rows = tokens = scores = families = 0
    out[: L.HEADER_WORDS] = 0
    end_row(out, stride, -1, 0, 0, 0)
    done = 0

    for i in range(handles.shape[0]):
        if i < done:
            continue
        until = run_end(kinds, i)
        if until - i >= least_run:
            scores, families = put_run(
                state, optional, kinds, i, until, handles, token_ids, token_starts, logprobs, logprob_starts, out,
                places, rows, tokens, scores, families,
            )  # fmt: skip
            out[L.H_CONVEYED] += (until - i) * (kinds[i] == CONVEYED)
            rows, tokens, done = rows + until - i, tokens + until - i, until
            continue
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
        widths = 0
        if optional is not None:
            widths = loop_optional.widths_of(state, slot, optional)

        # Host-judged: the run is passed on as it is.
        if flags & L.STATE_CONVEYED:
            put_row(out, stride, rows, i, slot, generation, L.ROW_CONVEYED, accept, 0, 0, 0)
            tokens = gather(token_ring, slot, 0, accept, 0, token_ids, start, out, token_at) - token_base
            if has_scores:
                scores = gather(logprob_ring, slot, 0, accept, 0, logprobs, score_start, out, score_at) - logprob_base
            if optional is not None:
                if widths:
                    families = loop_optional.gather(optional, slot, widths, 0, accept, 0, i, out, family_base, families)
                loop_optional.convey_counts(optional, i, mode, out, stride, rows)
            rows = end_row(out, stride, rows, tokens, scores, families)
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
            if optional is not None and mode & L.MODE_VERIFY:
                loop_optional.count(optional, slot, i, accept, mode)
        new_len = old_len + accept
        if not finished:
            visible = new_len
            if control.shape[1] and control[L.CONTROL_VISIBLE_LEN, i] >= 0:
                visible = min(new_len, int64(control[L.CONTROL_VISIBLE_LEN, i]))

        # Who sends: a finish once; else who is due and not held; else who would overrun its window.
        cursor, score_cursor = int64(state[slot, L.TOKEN_CURSOR]), int64(state[slot, L.LOGPROB_CURSOR])
        over = new_len - cursor > backlog_limit or (has_scores != 0 and new_len - score_cursor > backlog_limit)
        if widths:
            over = over or new_len - score_cursor > family_limit
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
            returns = has_scores != 0 and (over or mode & L.MODE_LOGPROBS != 0)
            retracted = asked & L.CONTROL_RETRACTED and policy & L.POLICY_RETRACTED_LOGPROBS
            end = visible if retracted else max(visible, 1)
            exist = min(end, new_len)
            shown = visible
            if returns and visible == 0 and cursor == 0 and exist > score_cursor:
                row_flags |= L.ROW_HIDDEN_TOKEN
                shown = exist
            put_row(out, stride, rows, i, slot, generation, row_flags, visible, row_match, cursor, score_cursor)
            tokens = gather(token_ring, slot, cursor, shown, old_len, token_ids, start, out, token_at) - token_base
            cursor = max(cursor, visible)
            if returns:
                scores = gather(
                    logprob_ring, slot, score_cursor, exist, old_len, logprobs, score_start, out, score_at
                ) - logprob_base  # fmt: skip
                if optional is not None and widths:
                    families = loop_optional.gather(
                        optional, slot, widths, score_cursor, exist, old_len, i, out, family_base, families
                    )
                score_cursor = max(score_cursor, exist if policy & L.POLICY_LOGPROB_EXISTING else end)
                if retracted and new_len == 0:
                    score_cursor = 0
            if optional is not None:
                loop_optional.put_counts(optional, slot, out, stride, rows)
            rows = end_row(out, stride, rows, tokens, scores, families)
            out[L.H_EARLY] += early
            out[L.H_FINISHED] += finished
            flags |= L.STATE_FINAL_SENT if finished else 0

        # What was not sent stays in the rings; state is written last.
        if not flags & L.STATE_FINAL_SENT:
            keep(token_ring, slot, cursor, new_len, old_len, token_ids, start)
            if has_scores:
                keep(logprob_ring, slot, score_cursor, new_len, old_len, logprobs, score_start)
                if optional is not None and widths and score_cursor < new_len:
                    loop_optional.keep(optional, slot, widths, score_cursor, new_len, old_len, i)
        state[slot, L.FLAGS] = flags
        state[slot, L.OUTPUT_LEN] = new_len
        state[slot, L.TOKEN_CURSOR] = cursor
        state[slot, L.LOGPROB_CURSOR] = score_cursor
        if finished:
            state[slot, L.FINISHED_LEN] = visible
            state[slot, L.MATCH] = match

    out[L.H_LAUNCH], out[L.H_BATCH], out[L.H_ROWS] = launch, handles.shape[0], rows
    out[L.H_TOKENS], out[L.H_LOGPROBS], out[L.H_FAMILIES] = tokens, scores, families


def _step_batch(
    state, token_ring, logprob_ring, optional, handles, accept_lens, token_ids, token_starts, logprobs, logprob_starts,
    control, out, places, limits, mode, launch, kinds, seen, check, max_accept, has_logprobs,
):  # fmt: skip
    """Check the inputs, then pack; (OK, 0), or what is wrong and in which row, and nothing was changed."""
    cause, row = check_batch(
        state, optional, handles, accept_lens, token_ids, token_starts, control, limits, mode, kinds, seen, check,
        max_accept, has_logprobs,
    )  # fmt: skip
    if cause == OK:
        pack_batch(
            state, token_ring, logprob_ring, optional, handles, accept_lens, token_ids, token_starts, logprobs,
            logprob_starts, control, out, places, limits, mode, launch, kinds,
        )  # fmt: skip
    return cause, row


def compile_step(optional):
    """`_step_batch` for a type of `optional`, none or OPTIONAL_TYPE, and token ids of both widths."""
    signatures = [
        types.UniTuple(int64, 2)(
            MATRIX32, MATRIX32, MATRIX32, optional, VECTOR64, VECTOR32, token[::1], VECTOR32, VECTOR32, VECTOR32,
            MATRIX32, VECTOR32, PLACES, VECTOR64, int64, int64, uint8[::1], VECTOR64, int64, int64, boolean,
        )
        for token in (int32, int64)
    ]  # fmt: skip
    return compiled(*signatures)(_step_batch)


step_batch = compile_step(types.none)
