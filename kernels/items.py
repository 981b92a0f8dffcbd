"""Moving items: from ring and run to the packed step, and what is unsent from the run to the ring."""

from __future__ import annotations

import triton
import triton.language as tl
from gpupack.kernels import constants as C
from gpupack.kernels.inputs import launch_word, words_at
from gpupack.kernels.rule import SECTOR


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
def record_width(widths):
    """Words of a position's record, `[BLOCK]`."""
    return 2 * (widths & C.TOP_WIDTH_MASK) + (widths >> C.IDS_WIDTH_SHIFT)


@triton.jit
def load_records(control_ptr, offs_row, widths, place, word, mask):
    """Word `word` of the records at `place` of the runs, `[BLOCK, SECTOR]`: values, ids, values of token ids."""
    row, top = offs_row[:, None].to(tl.int64), (widths & C.TOP_WIDTH_MASK)[:, None]
    top_width = launch_word(control_ptr, C.LAUNCH_TOP_WIDTH)
    offs = row * launch_word(control_ptr, C.LAUNCH_TOP_STRIDE) + place * top_width + word
    values = tl.load(words_at(control_ptr, C.ADDRESS_TOP_VAL) + offs, mask=mask & (word < top), other=0)
    is_id = mask & (word >= top) & (word < 2 * top)
    offs = row * launch_word(control_ptr, C.LAUNCH_TOP_IDX_STRIDE) + place * top_width + word - top
    offs = offs * launch_word(control_ptr, C.LAUNCH_IDX_STEP)  # ids are of the vocabulary: the low word has them
    ids = tl.load(words_at(control_ptr, C.ADDRESS_TOP_IDX) + offs, mask=is_id, other=0)
    offs = row * launch_word(control_ptr, C.LAUNCH_IDS_STRIDE) + word - 2 * top
    offs = offs + place * launch_word(control_ptr, C.LAUNCH_IDS_WIDTH)
    others = tl.load(words_at(control_ptr, C.ADDRESS_IDS_VAL) + offs, mask=mask & (word >= 2 * top), other=0)
    return values | ids | others


@triton.jit
def put_records(
    ring_ptr, slot, out_ptr, at, control_ptr, offs_row, widths, begin, end, old_len, mask_row, WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy the records of output positions [begin, end) of each row to out[at:]."""
    width = record_width(widths)
    words = tl.where(mask_row, tl.maximum(end - begin, 0) * width, 0)
    width = tl.maximum(width, 1)[:, None]
    for chunk in range(0, tl.max(words, axis=0), SECTOR):
        offs = chunk + tl.arange(0, SECTOR)[None, :]
        mask = offs < words[:, None]
        position, word = begin[:, None] + offs // width, offs % width
        kept = mask & (position < old_len[:, None])
        source = slot[:, None] * (WINDOW * WIDTH) + (position & (WINDOW - 1)) * WIDTH + word
        value = tl.load(ring_ptr + source, mask=kept, other=0)
        fresh = mask & (position >= old_len[:, None])
        value = value | load_records(control_ptr, offs_row, widths, position - old_len[:, None], word, fresh)
        tl.store(out_ptr + at[:, None] + offs, value, mask=mask)


@triton.jit
def keep_records(
    ring_ptr, slot, control_ptr, offs_row, widths, begin, end, old_len, mask_row, WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Keep the records of the run, from output position `begin` on, in the ring."""
    width = record_width(widths)
    first = tl.maximum(begin, old_len)
    words = tl.where(mask_row, tl.maximum(end - first, 0) * width, 0)
    width = tl.maximum(width, 1)[:, None]
    for chunk in range(0, tl.max(words, axis=0), SECTOR):
        offs = chunk + tl.arange(0, SECTOR)[None, :]
        mask = offs < words[:, None]
        position, word = first[:, None] + offs // width, offs % width
        value = load_records(control_ptr, offs_row, widths, position - old_len[:, None], word, mask)
        target = slot[:, None] * (WINDOW * WIDTH) + (position & (WINDOW - 1)) * WIDTH + word
        tl.store(ring_ptr + target, value, mask=mask)


@triton.jit
def put_speculative(
    spec_ptr, slot, out_ptr, stride, accept, block_len, cap_len, counted, has_caps, row, conveyed,
    MAX_ACCEPT: tl.constexpr, SPEC_WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Count a verify step of each row and write the counters; a conveyed row passes its lens on instead.

    `out_ptr`, `[BLOCK]`, is where a row's first counter goes, `stride` words from one counter to the next.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    drafts = C.SPEC_HISTOGRAMS + accept[:, None] - 1
    caps = C.SPEC_HISTOGRAMS + (MAX_ACCEPT + 1) + cap_len[:, None]
    more = tl.where(column == C.SPEC_BLOCK_ACCEPT, block_len[:, None], 0)
    more = more + tl.where(column == C.SPEC_CAP_TOKENS, cap_len[:, None], 0)
    lens = more
    more = more + tl.where(column == C.SPEC_VERIFY_CT, 1, 0)
    more = more + tl.where(column == C.SPEC_CORRECT_DRAFTS, accept[:, None] - 1, 0)
    more = more + tl.where(column == drafts, 1, 0) + tl.where((column == caps) & has_caps[:, None], 1, 0)
    mask = (column < SPEC_WIDTH) & ~conveyed[:, None]
    known = mask & (counted | row)[:, None]
    offs = slot[:, None] * SPEC_WIDTH + column
    value = tl.load(spec_ptr + offs, mask=known, other=0)
    value = value + tl.where((counted & ~conveyed)[:, None], more, 0)
    tl.debug_barrier()  # every warp has read the counters before one is written
    tl.store(spec_ptr + offs, value, mask=mask & counted[:, None])
    value = tl.where(conveyed[:, None], lens, value)
    tl.store(out_ptr[:, None] + column * stride, value, mask=(column < SPEC_WIDTH) & row[:, None])
