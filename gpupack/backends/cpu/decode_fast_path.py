"""Runs of rows that take in one token and send it or are conveyed with it, a column at a time; part of `loop.py`.

Most rows of most steps are such rows. What the loop does with a row at a time comes to this for them, in a
fraction of the time: `loop_check` says which they are, before anything is changed.
"""

from __future__ import annotations

from gpupack.backends.cpu import extra_logprobs as loop_optional
from gpupack.backends.cpu.emit_rule import as_int32, is_usual
from gpupack.core import layout as L
from gpupack.core.jit import called, inlined

# Kind of a row.
OTHER, USUAL, CONVEYED = range(3)


@inlined
def kind_of(state, slot, flags, accept, token, mode, vocab_size):
    """Kind of a live row of which the host asks nothing, in a step that counts nothing."""
    if accept != 1:
        return OTHER
    if flags & L.STATE_CONVEYED:
        return CONVEYED
    if mode & L.MODE_PACK and is_usual(state, slot, flags, token, mode, vocab_size):
        return USUAL
    return OTHER


@inlined
def run_end(kinds, begin):
    """Where the run ends that begins with row `begin`, whose rows are all usual or all conveyed; `begin` for none."""
    end = begin
    if kinds[begin] != OTHER:
        while end < kinds.shape[0] and kinds[end] == kinds[begin]:
            end += 1
    return end


@inlined
def _fill(out, stride, field, row, count, value):
    start = L.HEADER_WORDS + field * stride + row
    column = out[start : start + count]
    for k in range(count):
        column[k] = value


@inlined
def _count_up(out, stride, field, row, count, first):
    start = L.HEADER_WORDS + field * stride + row
    column = out[start : start + count]
    for k in range(count):
        column[k] = first + k


@called
def put_run(
    state, optional, kinds, begin, end, handles, token_ids, token_starts, logprobs, logprob_starts, out, places,
    rows, tokens, scores, families,
):  # fmt: skip
    """Write the rows of [begin, end), which are usual or conveyed; returns where logprobs and families end then."""
    stride, count = places[0], end - begin
    conveyed = kinds[begin] == CONVEYED
    columns = out[L.HEADER_WORDS + rows :]
    slots = columns[L.R_SLOT * stride : L.R_SLOT * stride + count]
    generations = columns[L.R_GENERATION * stride : L.R_GENERATION * stride + count]
    for k in range(count):
        slots[k] = handles[begin + k] & 0xFFFFFFFF
        generations[k] = handles[begin + k] >> L.SLOT_BITS
    _count_up(out, stride, L.R_BATCH_INDEX, rows, count, begin)
    _count_up(out, stride, L.R_TOKEN_INDPTR, rows + 1, count, tokens + 1)
    _fill(out, stride, L.R_FLAGS, rows, count, L.ROW_CONVEYED if conveyed else 0)
    _fill(out, stride, L.R_MATCH, rows, count, 0)
    ids = out[places[1] + tokens : places[1] + tokens + count]
    for k in range(count):
        ids[k] = as_int32(token_ids[token_starts[begin + k]])

    visible = columns[L.R_VISIBLE_LEN * stride : L.R_VISIBLE_LEN * stride + count]
    if conveyed:
        _fill(out, stride, L.R_VISIBLE_LEN, rows, count, 1)
        _fill(out, stride, L.R_TOKEN_START, rows, count, 0)
        _fill(out, stride, L.R_LOGPROB_START, rows, count, 0)
    else:
        token_at = columns[L.R_TOKEN_START * stride : L.R_TOKEN_START * stride + count]
        score_at = columns[L.R_LOGPROB_START * stride : L.R_LOGPROB_START * stride + count]
        for k in range(count):
            own = state[slots[k]]
            length = own[L.OUTPUT_LEN]
            visible[k], token_at[k], score_at[k] = length + 1, length, own[L.LOGPROB_CURSOR]
            own[L.OUTPUT_LEN] = own[L.TOKEN_CURSOR] = length + 1
    if logprobs.shape[0] == 0:
        _fill(out, stride, L.R_LOGPROB_INDPTR, rows + 1, count, scores)
        _fill(out, stride, L.R_FAMILIES_INDPTR, rows + 1, count, families)
        return scores, families
    return _put_scores(
        state, optional, begin, slots, conveyed, visible, logprobs, logprob_starts, out, places, rows, scores, families
    )


@inlined
def _put_scores(
    state, optional, begin, slots, conveyed, visible, logprobs, logprob_starts, out, places, rows, scores, families
):  # fmt: skip
    """Write the logprobs and families of a run's rows, those that have any."""
    stride, count = places[0], slots.shape[0]
    columns = out[L.HEADER_WORDS + rows + 1 :]
    score_ends = columns[L.R_LOGPROB_INDPTR * stride : L.R_LOGPROB_INDPTR * stride + count]
    family_ends = columns[L.R_FAMILIES_INDPTR * stride : L.R_FAMILIES_INDPTR * stride + count]
    for k in range(count):
        own = state[slots[k]]
        if own[L.FLAGS] & L.STATE_LOGPROBS:
            out[places[2] + scores] = logprobs[logprob_starts[begin + k]]
            scores += 1
            if not conveyed:
                own[L.LOGPROB_CURSOR] = visible[k]
            if optional is not None:
                widths = loop_optional.widths_of(state, slots[k], optional)
                if widths:
                    families = loop_optional.put_record(optional, widths, begin + k, 0, out, places[3], families)
        score_ends[k] = scores
        family_ends[k] = families
    return scores, families
