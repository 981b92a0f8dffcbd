"""One step of a packer in one launch: append, finish, who sends, scan, gather, advance.

The same rule as `gpupack/backends/cpu/pack_loop.py`, to the bit, for a block of the batch a program. Everything a
program reads of a slot it reads first; a barrier; then it writes. The parts are `rule.py`, `inputs.py`,
`scan.py` and `items.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gpupack.kernels import constants as C
from gpupack.kernels.inputs import address, control_row, launch_word, load_lens, load_run, words_at
from gpupack.kernels.items import keep_items, keep_records, put_items, put_records, put_speculative, record_width
from gpupack.kernels.rule import INT32_MAX, SECTOR, field, find_finish, is_due, rows_if, state_half
from gpupack.kernels.scan import count, publish, put_counts, put_sum, rows_below, sums_below, three_counts


@triton.jit
def pack_kernel(
    arena_ptr,  # int32: `HostArenas.parts`, one behind the other
    control_ptr,  # int32 [RING, CONTROL_WORDS]: launch words, addresses, control rows [CONTROL_WIDTH, batch]
    out_ptr,  # int32 [RING, OUT_WORDS]: packed steps
    scan_ptr,  # int64: launch number, place in the ring, then words [SCAN axes, BLOCKS]
    CAPACITY: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_ITEMS: tl.constexpr,
    BACKLOG_LIMIT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    POLICY: tl.constexpr,
    LOGPROBS: tl.constexpr,
    MAX_ACCEPT: tl.constexpr,
    FAMILY_WIDTH: tl.constexpr,  # words of the widest record; 0: no top-k or token-ids logprobs
    FAMILY_WINDOW: tl.constexpr,
    FAMILY_LIMIT: tl.constexpr,
    SPEC_WIDTH: tl.constexpr,  # speculative counters of a slot; 0: none
    ACCEPT: tl.constexpr,  # longest run, rounded up to a power of two
    SPEC_COLUMNS: tl.constexpr,  # likewise
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # most blocks of a launch, a power of two
    RING: tl.constexpr,
    CONTROL_WORDS: tl.constexpr,
    OUT_WORDS: tl.constexpr,
):
    """One step for BLOCK rows of the batch; see the module and CUDA.md."""
    block = tl.program_id(0)
    launch = tl.load(scan_ptr + C.SCAN_LAUNCH)
    place_in_ring = tl.load(scan_ptr + C.SCAN_RING)
    control_ptr += place_in_ring * CONTROL_WORDS
    out_ptr += place_in_ring * OUT_WORDS
    batch = launch_word(control_ptr, C.LAUNCH_BATCH)
    # A launch that was not prepared finds what an earlier one was told, and does nothing.
    number = launch_word(control_ptr, C.LAUNCH_NUMBER)
    stray = (number != -1) & (number != launch.to(tl.int32))
    batch = tl.where(stray, 0, batch)
    mode = launch_word(control_ptr, C.LAUNCH_MODE)
    token_ring_ptr = arena_ptr + CAPACITY * C.STATE_WIDTH
    logprob_ring_ptr = token_ring_ptr + tl.full([], CAPACITY, tl.int64) * WINDOW
    family_ring_ptr = logprob_ring_ptr + tl.full([], CAPACITY, tl.int64) * (WINDOW if LOGPROBS else 0)
    spec_ptr = family_ring_ptr + tl.full([], CAPACITY, tl.int64) * (FAMILY_WINDOW * FAMILY_WIDTH)

    # Handle check: a handle that has ended, was never given or is padding has no live slot.
    offs_row = block * BLOCK + tl.arange(0, BLOCK)
    mask_row = offs_row < batch
    handles_ptr = address(control_ptr, C.ADDRESS_HANDLES).to(tl.pointer_type(tl.int64))
    handle = tl.load(handles_ptr + offs_row, mask=mask_row, other=C.PADDING_HANDLE)
    slot = handle & 0xFFFFFFFF
    mask_slot = (handle >= 0) & (slot < CAPACITY)
    # By halves: a field is taken out of 8 columns with half the instructions that 16 need.
    hot = state_half(arena_ptr, slot, 0, mask_slot)
    cold = state_half(arena_ptr, slot, SECTOR, mask_slot)  # match, widths and stop ids
    flags = field(hot, C.FLAGS)
    generation = (handle >> C.SLOT_BITS).to(tl.int32)
    live = mask_slot & (field(hot, C.GENERATION) == generation) & ((flags & C.STATE_LIVE) != 0)
    stale = mask_row & ~live & (handle != C.PADDING_HANDLE)

    # What the host asks; a skipped row neither appends nor sends.
    mask_control = live & rows_if(launch_word(control_ptr, C.LAUNCH_CONTROLLED), offs_row, batch)
    asked = control_row(control_ptr, C.CONTROL_FLAGS_ROW, batch, offs_row, mask_control, 0)
    visible_len = control_row(control_ptr, C.CONTROL_VISIBLE_LEN, batch, offs_row, mask_control, -1)
    live = live & ((asked & C.CONTROL_SKIP) == 0)

    # The accepted run, [BLOCK, ACCEPT]; a row with an impossible length, or without its logprobs, is an error.
    appending, packing = rows_if(mode & C.MODE_APPEND, offs_row, batch), rows_if(mode & C.MODE_PACK, offs_row, batch)
    accept = tl.load(words_at(control_ptr, C.ADDRESS_ACCEPT_LENS) + offs_row, mask=live & appending, other=0)
    has_scores = live & ((flags & C.STATE_LOGPROBS) != 0)
    widths = field(cold, C.WIDTHS)
    without_scores = rows_if(1 - launch_word(control_ptr, C.LAUNCH_HAS_LOGPROBS), offs_row, batch)
    if FAMILY_WIDTH:
        few = (widths & C.TOP_WIDTH_MASK) > launch_word(control_ptr, C.LAUNCH_TOP_WIDTH)
        without_scores = without_scores | few
        few = (widths >> C.IDS_WIDTH_SHIFT) > launch_word(control_ptr, C.LAUNCH_IDS_WIDTH)
        without_scores = without_scores | few
    error = live & (
        (accept < 0)
        | (accept > launch_word(control_ptr, C.LAUNCH_MAX_ACCEPT))
        | (has_scores & (accept > 0) & without_scores)
    )
    # What the host asks must fit the request's lengths, as `loop_check.py` has it.
    length = field(hot, C.OUTPUT_LEN) + accept
    mask_open = live & ((flags & (C.STATE_CONVEYED | C.STATE_FINISHED)) == 0)
    asked_end = control_row(
        control_ptr, C.CONTROL_FINISHED_LEN, batch, offs_row, mask_control & ((asked & C.CONTROL_FINISH) != 0), -1
    )
    from_tokens = tl.maximum(field(hot, C.TOKEN_CURSOR), visible_len)
    from_scores = tl.maximum(field(hot, C.LOGPROB_CURSOR), visible_len)
    unseen = length - tl.where(has_scores, tl.minimum(from_tokens, from_scores), from_tokens)
    beyond = unseen > BACKLOG_LIMIT
    if FAMILY_WIDTH:
        beyond = beyond | ((widths != 0) & (unseen > FAMILY_LIMIT))
    error = error | (mask_open & ((asked_end > length) | ((visible_len >= 0) & beyond)))
    if SPEC_WIDTH:
        verified = live & rows_if(mode & C.MODE_VERIFY, offs_row, batch)
        block_len = load_lens(control_ptr, C.ADDRESS_BLOCK_ACCEPT, offs_row, batch, verified)
        cap_len = load_lens(control_ptr, C.ADDRESS_CAP, offs_row, batch, verified)
        error = error | (block_len < 0) | (cap_len < 0) | (cap_len > MAX_ACCEPT)
    live = live & ~error
    accept = tl.where(live, accept, 0)
    has_scores = has_scores & live
    conveyed = live & ((flags & C.STATE_CONVEYED) != 0)
    gone = live & ~conveyed & ((flags & C.STATE_FINAL_SENT) != 0)
    late = gone & (accept > 0)
    taken = live & ~conveyed & ~gone
    was_finished = (flags & C.STATE_FINISHED) != 0
    accept = tl.where(conveyed | (taken & ~was_finished), accept, 0)
    mask_run = tl.arange(0, ACCEPT)[None, :] < accept[:, None]
    run = load_run(control_ptr, offs_row, batch, mask_run, ACCEPT)

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
    if FAMILY_WIDTH:
        over = over | (has_scores & (widths != 0) & (new_len - score_cursor > FAMILY_LIMIT))
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
    if C.POLICY_RETRACTED_LOGPROBS & POLICY:
        retracted = taken & ((asked & C.CONTROL_RETRACTED) != 0)
        score_end = tl.where(retracted, visible, score_end)
    exist = tl.minimum(score_end, new_len)
    hidden = returns & taken & (visible == 0) & (cursor == 0) & (exist > score_cursor)
    shown = tl.where(hidden, exist, visible)  # the id of a logprob may be that of a token that is not output
    tokens = tl.where(row, tl.maximum(shown - cursor, 0), 0)
    scores = tl.where(returns, tl.maximum(exist - score_cursor, 0), 0)
    rank = tl.cumsum(row.to(tl.int32), axis=0)
    token_sum, score_sum = tl.cumsum(tokens, axis=0), tl.cumsum(scores, axis=0)
    record_words = scores * record_width(widths) if FAMILY_WIDTH else scores * 0
    record_sum = tl.cumsum(record_words, axis=0) if FAMILY_WIDTH else record_words
    lost = three_counts(stale, late, early) | (tl.max(error.to(tl.int32), axis=0) << C.SCAN_ERROR)
    kinds = three_counts(held, finished & row, conveyed)
    block_rows, block_tokens, block_scores = count(row), tl.sum(tokens, axis=0), tl.sum(scores, axis=0)
    put_sum(scan_ptr, C.SCAN_TOKENS, block, block_tokens, BLOCKS)
    put_sum(scan_ptr, C.SCAN_LOGPROBS, block, block_scores, BLOCKS)
    if FAMILY_WIDTH:
        put_sum(scan_ptr, C.SCAN_FAMILIES, block, tl.sum(record_words, axis=0), BLOCKS)
    put_sum(scan_ptr, C.SCAN_LOST, block, lost, BLOCKS)
    put_sum(scan_ptr, C.SCAN_KINDS, block, kinds, BLOCKS)
    # Everything of a slot has been read, by every warp: from here on it may be written. It also orders
    # this block's sums, and its reads of the launch number, before the word that carries that number.
    tl.debug_barrier()
    publish(scan_ptr, block, launch, block_rows, BLOCKS)
    first_row = rows_below(scan_ptr, block, launch, BLOCKS)
    first_token = tl.sum(sums_below(scan_ptr, C.SCAN_TOKENS, block, BLOCKS), axis=0)
    first_score = tl.sum(sums_below(scan_ptr, C.SCAN_LOGPROBS, block, BLOCKS), axis=0)
    first_record = first_score * 0
    if FAMILY_WIDTH:
        first_record = tl.sum(sums_below(scan_ptr, C.SCAN_FAMILIES, block, BLOCKS), axis=0)

    # The row table, columns of `stride` words (layout.packed_layout).
    stride = (batch + C.ALIGN_WORDS) // C.ALIGN_WORDS * C.ALIGN_WORDS
    token_base = C.HEADER_WORDS + (C.ROW_WIDTH + SPEC_WIDTH) * stride
    items = (batch.to(tl.int64) * MAX_ITEMS + C.ALIGN_WORDS - 1) // C.ALIGN_WORDS * C.ALIGN_WORDS
    score_base = token_base + items
    at = out_ptr + C.HEADER_WORDS + first_row + rank - 1
    row_flags = ((flags >> C.CODE_SHIFT) & C.CODE_MASK) << C.ROW_CODE_SHIFT
    row_flags = row_flags | tl.where(finished, C.ROW_FINAL, 0) | tl.where(early, C.ROW_EARLY, 0)
    row_flags = row_flags | tl.where(hidden, C.ROW_HIDDEN_TOKEN, 0)
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
    tl.store(at + C.R_FAMILIES_INDPTR * stride + 1, first_record + record_sum, mask=row)

    # The items: tokens from the cursor to the visible length, logprobs from a cursor of their own.
    token_at = (token_base + first_token + token_sum - tokens).to(tl.int64)
    put_items(token_ring_ptr, slot, out_ptr, token_at, run, cursor, shown, old_len, row, WINDOW, ACCEPT)
    sent_to = tl.where(row, tl.maximum(cursor, visible), cursor)
    final = finished & row
    if LOGPROBS:
        score_stride = launch_word(control_ptr, C.LAUNCH_LOGPROB_STRIDE)
        offs_run = offs_row[:, None].to(tl.int64) * score_stride + tl.arange(0, ACCEPT)[None, :]
        mask_scores = mask_run & has_scores[:, None]
        score_run = tl.load(words_at(control_ptr, C.ADDRESS_LOGPROBS) + offs_run, mask=mask_scores, other=0)
        score_at = score_base + first_score + score_sum - scores
        put_items(
            logprob_ring_ptr, slot, out_ptr, score_at, score_run, score_cursor, exist, old_len, returns, WINDOW, ACCEPT
        )
        first_unsent = exist
        if not C.POLICY_LOGPROB_EXISTING & POLICY:
            first_unsent = score_end
        unsent_from = tl.where(returns & taken, tl.maximum(score_cursor, first_unsent), score_cursor)
        if C.POLICY_RETRACTED_LOGPROBS & POLICY:
            unsent_from = tl.where(returns & retracted & (new_len == 0), 0, unsent_from)
        keep = has_scores & taken & ~final
        keep_items(logprob_ring_ptr, slot, score_run, unsent_from, new_len, old_len, keep, WINDOW, ACCEPT)
        if FAMILY_WIDTH:
            record_at = score_base + items + first_record + record_sum - record_words
            put_records(
                family_ring_ptr, slot, out_ptr, record_at, control_ptr, offs_row, widths, score_cursor, exist, old_len,
                returns, FAMILY_WINDOW, FAMILY_WIDTH,
            )  # fmt: skip
            keep_records(
                family_ring_ptr, slot, control_ptr, offs_row, widths, unsent_from, new_len, old_len, keep,
                FAMILY_WINDOW, FAMILY_WIDTH,
            )  # fmt: skip
        score_cursor = unsent_from
    keep_items(token_ring_ptr, slot, run, sent_to, new_len, old_len, taken & ~final, WINDOW, ACCEPT)

    if SPEC_WIDTH:
        has_caps = rows_if(mode & C.MODE_CAP_LENS, offs_row, batch)
        counted = verified & (conveyed | (taken & (accept > 0)))
        put_speculative(
            spec_ptr, slot, at + C.ROW_WIDTH * stride, stride, accept, block_len, cap_len, counted, has_caps, row,
            conveyed, MAX_ACCEPT, SPEC_WIDTH, SPEC_COLUMNS,
        )  # fmt: skip

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
        tl.store(out_ptr + C.HEADER_WORDS + C.R_FAMILIES_INDPTR * stride, 0)
    if block == tl.num_programs(0) - 1:
        lost_below = sums_below(scan_ptr, C.SCAN_LOST, block, BLOCKS)
        kinds_below = sums_below(scan_ptr, C.SCAN_KINDS, block, BLOCKS)
        tl.store(out_ptr + C.H_LAUNCH, launch.to(tl.int32))
        tl.store(out_ptr + C.H_BATCH, batch)
        tl.store(out_ptr + C.H_ROWS, first_row + block_rows)
        tl.store(out_ptr + C.H_TOKENS, first_token + block_tokens)
        tl.store(out_ptr + C.H_LOGPROBS, first_score + block_scores)
        tl.store(out_ptr + C.H_FAMILIES, first_record + tl.sum(record_words, axis=0))
        put_counts(out_ptr, lost, lost_below, C.H_STALE, C.H_LATE, C.H_EARLY)
        put_counts(out_ptr, kinds, kinds_below, C.H_HELD, C.H_FINISHED, C.H_CONVEYED)
        errors = (lost >> C.SCAN_ERROR) | tl.max(lost_below >> C.SCAN_ERROR, axis=0)
        errors = errors | tl.where(stray, C.ERROR_NUMBER, 0)
        errors = errors | tl.where(batch > tl.num_programs(0) * BLOCK, C.ERROR_BATCH, 0)
        tl.store(out_ptr + C.H_ERROR, errors)
        tl.store(scan_ptr + C.SCAN_LAUNCH, tl.where(launch == INT32_MAX, 1, launch + 1).to(tl.int64))
        tl.store(scan_ptr + C.SCAN_RING, tl.where(place_in_ring == RING - 1, 0, place_in_ring + 1))
