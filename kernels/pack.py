"""One step of a packer in one launch: append, finish, who sends, scan, gather, advance.

The same rule as `gpupack/loop.py`, to the bit, for a block of the batch a program. Everything a
program reads of a slot it reads first; a barrier; then it writes. Blocks learn the sums of the blocks
before them through one 64-bit word each, a launch number above a count, and sums stored before it (CUDA.md).
"""

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
def as_int32(token):
    """Token ids in 32 bits; one that does not fit stays out of every vocabulary."""
    return tl.minimum(tl.maximum(token.to(tl.int64), INT32_MIN), INT32_MAX).to(tl.int32)


@triton.jit
def control_row(control_ptr, FIELD: tl.constexpr, batch, offs_row, mask_row, UNSET: tl.constexpr):
    """Control word FIELD of the block's rows, `[BLOCK]`; UNSET where there is none."""
    return tl.load(control_ptr + C.LAUNCH_WORDS + FIELD * batch + offs_row, mask=mask_row, other=UNSET)


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


@triton.jit
def put_items(
    ring_ptr, slot, out_ptr, at, run, begin, end, old_len, mask_row, WINDOW: tl.constexpr, ACCEPT: tl.constexpr
):
    """Copy output items [begin, end) of each row to out[at:]: the ring has those before old_len, the run the rest."""
    in_ring = tl.where(mask_row, tl.minimum(end, old_len) - begin, 0)
    for chunk in range(0, tl.max(in_ring, axis=0), SECTOR):
        place = chunk + tl.arange(0, SECTOR)[None, :]
        mask = place < in_ring[:, None]
        source = slot[:, None] * WINDOW + ((begin[:, None] + place) & (WINDOW - 1))
        tl.store(out_ptr + at[:, None] + place, tl.load(ring_ptr + source, mask=mask), mask=mask)
    position = old_len[:, None] + tl.arange(0, ACCEPT)[None, :]
    mask = mask_row[:, None] & (position >= begin[:, None]) & (position < end[:, None])
    tl.store(out_ptr + at[:, None] + position - begin[:, None], run, mask=mask)


@triton.jit
def keep_items(ring_ptr, slot, run, begin, end, old_len, mask_row, WINDOW: tl.constexpr, ACCEPT: tl.constexpr):
    """Keep what is unsent of the run, from output position `begin` on, in the ring."""
    position = old_len[:, None] + tl.arange(0, ACCEPT)[None, :]
    mask = mask_row[:, None] & (position >= begin[:, None]) & (position < end[:, None])
    tl.store(ring_ptr + slot[:, None] * WINDOW + (position & (WINDOW - 1)), run, mask=mask)


@triton.jit
def count(condition):
    """How many rows of the block."""
    return tl.sum(condition.to(tl.int32), axis=0)


@triton.jit
def three_counts(a, b, c):
    """Three counts of the block in one word."""
    first, second, third = a.to(tl.int32), b.to(tl.int32), c.to(tl.int32)
    return tl.sum(first | (second << C.SCAN_SECOND) | (third << C.SCAN_THIRD), axis=0)


@triton.jit
def put_sum(scan_ptr, AXIS: tl.constexpr, block, value, BLOCKS: tl.constexpr):
    """Lay down this block's sum on an axis; `publish` tells later blocks that it is there."""
    tl.store(scan_ptr + C.SCAN_HEADER + AXIS * BLOCKS + block, value.to(tl.int64))


@triton.jit
def publish(scan_ptr, block, launch, rows, BLOCKS: tl.constexpr):
    """Tell later blocks that all sums of this block are there, and how many rows it has."""
    word = (launch << 32) | rows.to(tl.int64)
    tl.atomic_xchg(scan_ptr + C.SCAN_HEADER + C.SCAN_ROWS * BLOCKS + block, word, sem="release")


@triton.jit
def rows_below(scan_ptr, block, launch, BLOCKS: tl.constexpr):
    """Rows of all lower blocks; waits until every one has published in this launch."""
    offs = tl.arange(0, BLOCKS)
    mask = offs < block
    pointer = scan_ptr + C.SCAN_HEADER + C.SCAN_ROWS * BLOCKS + offs
    word = tl.atomic_add(pointer, 0, mask=mask, sem="acquire")
    while tl.max(tl.where(mask & ((word >> 32) != launch), 1, 0), axis=0) == 1:
        word = tl.atomic_add(pointer, 0, mask=mask, sem="acquire")
    return tl.sum(tl.where(mask, word & 0xFFFFFFFF, 0).to(tl.int32), axis=0)


@triton.jit
def sums_below(scan_ptr, AXIS: tl.constexpr, block, BLOCKS: tl.constexpr):
    """Sums of the lower blocks on an axis, `[BLOCKS]`, 0 elsewhere; all of them have published."""
    offs = tl.arange(0, BLOCKS)
    return tl.load(scan_ptr + C.SCAN_HEADER + AXIS * BLOCKS + offs, mask=offs < block, other=0).to(tl.int32)


@triton.jit
def put_counts(out_ptr, own, below, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """Header words of three counters: this block's and those of the blocks below."""
    tl.store(out_ptr + FIRST, (own & C.SCAN_COUNT_MASK) + tl.sum(below & C.SCAN_COUNT_MASK, axis=0))
    own_second, second = own >> C.SCAN_SECOND, below >> C.SCAN_SECOND
    tl.store(out_ptr + SECOND, (own_second & C.SCAN_COUNT_MASK) + tl.sum(second & C.SCAN_COUNT_MASK, axis=0))
    own_third, third = own >> C.SCAN_THIRD, below >> C.SCAN_THIRD
    tl.store(out_ptr + THIRD, (own_third & C.SCAN_COUNT_MASK) + tl.sum(third & C.SCAN_COUNT_MASK, axis=0))


# Inputs come from wherever the sampler put them: their alignment must not choose a variant.
@triton.jit(
    do_not_specialize_on_alignment=["handles_ptr", "token_ids_ptr", "accept_lens_ptr", "logprobs_ptr"],
)
def pack_kernel(
    arena_ptr,  # int32: state [CAPACITY, STATE_WIDTH], token ring [CAPACITY, WINDOW], logprob ring likewise
    handles_ptr,  # int64 [batch]
    token_ids_ptr,  # int32 or int64 [batch, token_stride]
    accept_lens_ptr,  # int32 [batch]
    logprobs_ptr,  # int32 bit patterns [batch, logprob_stride]
    control_ptr,  # int32: launch words, then control rows [CONTROL_WIDTH, batch]
    out_ptr,  # int32: one packed step
    scan_ptr,  # int64: launch number, then words [SCAN axes, BLOCKS]
    CAPACITY: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_ITEMS: tl.constexpr,
    BACKLOG_LIMIT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    POLICY: tl.constexpr,
    LOGPROBS: tl.constexpr,
    ACCEPT: tl.constexpr,  # longest run, rounded up to a power of two
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # most blocks of a launch, a power of two
):
    """One step for BLOCK rows of the batch; see the module and CUDA.md."""
    block = tl.program_id(0)
    launch = tl.load(scan_ptr)
    batch = tl.load(control_ptr + C.LAUNCH_BATCH)
    mode = tl.load(control_ptr + C.LAUNCH_MODE)
    token_ring_ptr = arena_ptr + CAPACITY * C.STATE_WIDTH
    logprob_ring_ptr = token_ring_ptr + tl.full([], CAPACITY, tl.int64) * WINDOW

    # Handle check: a handle that has ended, was never given or is padding has no live slot.
    offs_row = block * BLOCK + tl.arange(0, BLOCK)
    mask_row = offs_row < batch
    handle = tl.load(handles_ptr + offs_row, mask=mask_row, other=C.PADDING_HANDLE)
    slot = handle & 0xFFFFFFFF
    mask_slot = (handle >= 0) & (slot < CAPACITY)
    # By halves: a field is taken out of 8 columns with half the instructions that 16 need.
    hot = state_half(arena_ptr, slot, 0, mask_slot)
    cold = state_half(arena_ptr, slot, SECTOR, mask_slot)  # the match and the stop ids
    flags = field(hot, C.FLAGS)
    generation = (handle >> C.SLOT_BITS).to(tl.int32)
    live = mask_slot & (field(hot, C.GENERATION) == generation) & ((flags & C.STATE_LIVE) != 0)
    stale = mask_row & ~live & (handle != C.PADDING_HANDLE)

    # What the host asks; a skipped row neither appends nor sends.
    mask_control = live & rows_if(tl.load(control_ptr + C.LAUNCH_CONTROLLED), offs_row, batch)
    asked = control_row(control_ptr, C.CONTROL_FLAGS_ROW, batch, offs_row, mask_control, 0)
    visible_len = control_row(control_ptr, C.CONTROL_VISIBLE_LEN, batch, offs_row, mask_control, -1)
    live = live & ((asked & C.CONTROL_SKIP) == 0)

    # The accepted run, [BLOCK, ACCEPT]; a row with an impossible length, or without its logprobs, is an error.
    appending, packing = rows_if(mode & C.MODE_APPEND, offs_row, batch), rows_if(mode & C.MODE_PACK, offs_row, batch)
    accept = tl.load(accept_lens_ptr + offs_row, mask=live & appending, other=0)
    has_scores = live & ((flags & C.STATE_LOGPROBS) != 0)
    without_scores = rows_if(1 - tl.load(control_ptr + C.LAUNCH_HAS_LOGPROBS), offs_row, batch)
    error = live & (
        (accept < 0)
        | (accept > tl.load(control_ptr + C.LAUNCH_MAX_ACCEPT))
        | (has_scores & (accept > 0) & without_scores)
    )
    live = live & ~error
    accept = tl.where(live, accept, 0)
    has_scores = has_scores & live
    conveyed = live & ((flags & C.STATE_CONVEYED) != 0)
    gone = live & ~conveyed & ((flags & C.STATE_FINAL_SENT) != 0)
    late = gone & (accept > 0)
    taken = live & ~conveyed & ~gone
    was_finished = (flags & C.STATE_FINISHED) != 0
    accept = tl.where(conveyed | (taken & ~was_finished), accept, 0)
    place = tl.arange(0, ACCEPT)[None, :]
    mask_run = place < accept[:, None]
    offs_run = offs_row[:, None].to(tl.int64)
    token_stride = tl.load(control_ptr + C.LAUNCH_TOKEN_STRIDE)
    run = as_int32(tl.load(token_ids_ptr + offs_run * token_stride + place, mask=mask_run, other=0))

    # Whether it ends: what the host asks goes first; nothing counts behind a finish that is known already.
    old_len = tl.where(conveyed, 0, field(hot, C.OUTPUT_LEN))
    new_len = old_len + accept
    max_new_tokens = field(hot, C.MAX_NEW_TOKENS)
    code, end, match = find_finish(max_new_tokens, cold, flags, old_len, accept, run, VOCAB_SIZE, ACCEPT)
    judged = (flags & C.STATE_JUDGED) != 0
    code, end, match = tl.where(judged, code, C.FINISH_NONE), tl.where(judged, end, -1), tl.where(judged, match, 0)
    mask_finish = mask_control & ((asked & C.CONTROL_FINISH) != 0)
    wanted = control_row(control_ptr, C.CONTROL_FINISHED_LEN, batch, offs_row, mask_finish, -1)
    open_end = tl.where(code == C.FINISH_NONE, new_len, end)
    end = tl.where(mask_finish, tl.where(wanted >= 0, wanted, open_end), end)
    host_code = control_row(control_ptr, C.CONTROL_FINISH_CODE, batch, offs_row, mask_finish, 0)
    host_match = control_row(control_ptr, C.CONTROL_MATCH, batch, offs_row, mask_finish, 0)
    code = tl.where(was_finished, C.FINISH_NONE, tl.where(mask_finish, host_code, code))
    match = tl.where(was_finished, field(cold, C.MATCH), tl.where(mask_finish, host_match, match))
    finished = taken & (was_finished | (code != C.FINISH_NONE))
    end = tl.where(was_finished, field(hot, C.FINISHED_LEN), end)
    flags = flags | (code << C.CODE_SHIFT) | tl.where(finished, C.STATE_FINISHED, 0)
    visible = tl.where(visible_len >= 0, tl.minimum(new_len, visible_len), new_len)
    visible = tl.where(finished, end, tl.where(conveyed, accept, visible))

    # Who sends: a finish once; else who is due and not held; else who would overrun its window.
    cursor = tl.where(conveyed, 0, field(hot, C.TOKEN_CURSOR))
    score_cursor = tl.where(conveyed, 0, field(hot, C.LOGPROB_CURSOR))
    over = (new_len - cursor > BACKLOG_LIMIT) | (has_scores & (new_len - score_cursor > BACKLOG_LIMIT))
    over = over & taken
    due = is_due(flags, visible, cursor, field(hot, C.INTERVAL), POLICY)
    due = due | (((asked & C.CONTROL_FLUSH) != 0) & (visible > cursor))
    due = due & taken & ~finished & packing
    held = due & ((asked & C.CONTROL_HOLD) != 0)
    if not C.POLICY_HOLD_FORCED & POLICY:
        held = held & ((flags & C.STATE_STREAM) != 0)
    sends = (finished & packing) | (due & ~held)
    early = over & ~sends
    row = conveyed | sends | early
    returns = has_scores & (conveyed | (row & (over | rows_if(mode & C.MODE_LOGPROBS, offs_row, batch))))

    # How many items; then where, in the order of the batch.
    score_end = tl.where(conveyed, accept, tl.maximum(visible, 1))
    exist = tl.minimum(score_end, new_len)
    tokens = tl.where(row, tl.maximum(visible - cursor, 0), 0)
    scores = tl.where(returns, tl.maximum(exist - score_cursor, 0), 0)
    rank = tl.cumsum(row.to(tl.int32), axis=0)
    token_sum, score_sum = tl.cumsum(tokens, axis=0), tl.cumsum(scores, axis=0)
    lost = three_counts(stale, late, early) | (tl.max(error.to(tl.int32), axis=0) << C.SCAN_ERROR)
    kinds = three_counts(held, finished & row, conveyed)
    block_rows, block_tokens, block_scores = count(row), tl.sum(tokens, axis=0), tl.sum(scores, axis=0)
    put_sum(scan_ptr, C.SCAN_TOKENS, block, block_tokens, BLOCKS)
    put_sum(scan_ptr, C.SCAN_LOGPROBS, block, block_scores, BLOCKS)
    put_sum(scan_ptr, C.SCAN_LOST, block, lost, BLOCKS)
    put_sum(scan_ptr, C.SCAN_KINDS, block, kinds, BLOCKS)
    # Everything of a slot has been read, by every warp: from here on it may be written. It also orders
    # this block's sums, and its reads of the launch number, before the word that carries that number.
    tl.debug_barrier()
    publish(scan_ptr, block, launch, block_rows, BLOCKS)
    first_row = rows_below(scan_ptr, block, launch, BLOCKS)
    first_token = tl.sum(sums_below(scan_ptr, C.SCAN_TOKENS, block, BLOCKS), axis=0)
    first_score = tl.sum(sums_below(scan_ptr, C.SCAN_LOGPROBS, block, BLOCKS), axis=0)

    # The row table, columns of `stride` words (layout.packed_layout).
    stride = (batch + C.ALIGN_WORDS) // C.ALIGN_WORDS * C.ALIGN_WORDS
    token_base = C.HEADER_WORDS + C.ROW_WIDTH * stride
    items = (batch.to(tl.int64) * MAX_ITEMS + C.ALIGN_WORDS - 1) // C.ALIGN_WORDS * C.ALIGN_WORDS
    score_base = token_base + items
    at = out_ptr + C.HEADER_WORDS + first_row + rank - 1
    row_flags = ((flags >> C.CODE_SHIFT) & C.CODE_MASK) << C.ROW_CODE_SHIFT
    row_flags = row_flags | tl.where(finished, C.ROW_FINAL, 0) | tl.where(early, C.ROW_EARLY, 0)
    tl.store(at + C.R_BATCH_INDEX * stride, offs_row, mask=row)
    tl.store(at + C.R_SLOT * stride, slot.to(tl.int32), mask=row)
    tl.store(at + C.R_GENERATION * stride, generation, mask=row)
    tl.store(at + C.R_FLAGS * stride, tl.where(conveyed, C.ROW_CONVEYED, row_flags), mask=row)
    tl.store(at + C.R_VISIBLE_LEN * stride, visible, mask=row)
    tl.store(at + C.R_MATCH * stride, tl.where(finished, match, 0), mask=row)
    tl.store(at + C.R_TOKEN_START * stride, cursor, mask=row)
    tl.store(at + C.R_LOGPROB_START * stride, score_cursor, mask=row)
    tl.store(at + C.R_TOKEN_INDPTR * stride + 1, first_token + token_sum, mask=row)
    tl.store(at + C.R_LOGPROB_INDPTR * stride + 1, first_score + score_sum, mask=row)

    # The items: tokens from the cursor to the visible length, logprobs from a cursor of their own.
    token_at = (token_base + first_token + token_sum - tokens).to(tl.int64)
    put_items(token_ring_ptr, slot, out_ptr, token_at, run, cursor, visible, old_len, row, WINDOW, ACCEPT)
    sent_to = tl.where(row, tl.maximum(cursor, visible), cursor)
    final = finished & row
    if LOGPROBS:
        score_stride = tl.load(control_ptr + C.LAUNCH_LOGPROB_STRIDE)
        mask_scores = mask_run & has_scores[:, None]
        score_run = tl.load(logprobs_ptr + offs_run * score_stride + place, mask=mask_scores, other=0)
        score_at = score_base + first_score + score_sum - scores
        put_items(
            logprob_ring_ptr, slot, out_ptr, score_at, score_run, score_cursor, exist, old_len, returns, WINDOW, ACCEPT
        )
        if not C.POLICY_LOGPROB_EXISTING & POLICY:
            exist = score_end
        score_cursor = tl.where(returns & taken, tl.maximum(score_cursor, exist), score_cursor)
        keep = has_scores & taken & ~final
        keep_items(logprob_ring_ptr, slot, score_run, score_cursor, new_len, old_len, keep, WINDOW, ACCEPT)
    keep_items(token_ring_ptr, slot, run, sent_to, new_len, old_len, taken & ~final, WINDOW, ACCEPT)

    # The state: the hot sector of each slot at once, what ended it only when it ended.
    flags = flags | tl.where(final, C.STATE_FINAL_SENT, 0)
    columns = tl.arange(0, SECTOR)[None, :]
    values = tl.where(columns == C.FLAGS, flags[:, None], hot)
    values = tl.where(columns == C.OUTPUT_LEN, new_len[:, None], values)
    values = tl.where(columns == C.FINISHED_LEN, tl.where(finished, visible, -1)[:, None], values)
    values = tl.where(columns == C.TOKEN_CURSOR, sent_to[:, None], values)
    values = tl.where(columns == C.LOGPROB_CURSOR, score_cursor[:, None], values)
    tl.store(arena_ptr + slot[:, None] * C.STATE_WIDTH + columns, values, mask=taken[:, None])
    tl.store(arena_ptr + slot * C.STATE_WIDTH + C.MATCH, match, mask=finished)

    # The last block knows all sums: it writes the header and raises the launch number, which every
    # other block has read before it published.
    if block == 0:
        tl.store(out_ptr + C.HEADER_WORDS + C.R_TOKEN_INDPTR * stride, 0)
        tl.store(out_ptr + C.HEADER_WORDS + C.R_LOGPROB_INDPTR * stride, 0)
    if block == tl.num_programs(0) - 1:
        lost_below = sums_below(scan_ptr, C.SCAN_LOST, block, BLOCKS)
        kinds_below = sums_below(scan_ptr, C.SCAN_KINDS, block, BLOCKS)
        tl.store(out_ptr + C.H_LAUNCH, launch.to(tl.int32))
        tl.store(out_ptr + C.H_BATCH, batch)
        tl.store(out_ptr + C.H_ROWS, first_row + block_rows)
        tl.store(out_ptr + C.H_TOKENS, first_token + block_tokens)
        tl.store(out_ptr + C.H_LOGPROBS, first_score + block_scores)
        put_counts(out_ptr, lost, lost_below, C.H_STALE, C.H_LATE, C.H_EARLY)
        put_counts(out_ptr, kinds, kinds_below, C.H_HELD, C.H_FINISHED, C.H_CONVEYED)
        errors = (lost >> C.SCAN_ERROR) | tl.max(lost_below >> C.SCAN_ERROR, axis=0)
        tl.store(out_ptr + C.H_ERROR, errors)
        tl.store(scan_ptr, tl.where(launch == INT32_MAX, 1, launch + 1).to(tl.int64))
