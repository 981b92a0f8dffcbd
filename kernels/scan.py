"""Sums of the blocks before a block, within one launch (CUDA.md).

Each block has one 64-bit word, a launch number above a count, and stores its other sums before it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from gpupack.kernels import constants as C


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
