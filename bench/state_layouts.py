"""Where the state of a slot should lie: what reading and writing it costs in each arrangement, counted.

A kernel that does nothing else reads eight hot words and seven stop ids of slots in random order and
writes five words back. `python bench/state_layouts.py` prints the table.
"""

# ruff: noqa: N803 (constexpr arguments are capitals)

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "compiled")]
from ptxsim_runtime import ptxsim  # noqa: E402

ROWS, CAPACITY, BLOCK, WARPS, ARCH = 256, 512, 128, 4, 90
WAYS = {
    "one row a slot, read by halves": 0,
    "one row a slot, read whole": 1,
    "one row a slot, read word by word": 2,
    "one array a word": 3,
}


@triton.jit
def word(rows, FIELD: tl.constexpr, WIDTH: tl.constexpr):
    """Column FIELD of `[BLOCK, WIDTH]`, `[BLOCK]`."""
    return tl.sum(tl.where(tl.arange(0, WIDTH)[None, :] == FIELD, rows, 0), axis=1)


@triton.jit
def touch_kernel(state_ptr, slots_ptr, token_ptr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, WAY: tl.constexpr):
    """Read the state of BLOCK slots, combine it, write five words back."""
    offs_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + offs_row).to(tl.int64)
    token = tl.load(token_ptr + offs_row)
    half, whole = tl.arange(0, 8)[None, :], tl.arange(0, 16)[None, :]
    total = token
    if WAY == 0:
        hot = tl.load(state_ptr + slot[:, None] * 16 + half)
        cold = tl.load(state_ptr + slot[:, None] * 16 + 8 + half)
        for k in tl.static_range(8):
            total = total * 3 + word(hot, k, 8)
        total += tl.max((cold == token[:, None]).to(tl.int32), axis=1)
    if WAY == 1:
        rows = tl.load(state_ptr + slot[:, None] * 16 + whole)
        for k in tl.static_range(8):
            total = total * 3 + word(rows, k, 16)
        total += tl.max(((rows == token[:, None]) & (whole >= 8)).to(tl.int32), axis=1)
    if WAY >= 2:
        stride: tl.constexpr = 16 if WAY == 2 else 1
        step: tl.constexpr = 1 if WAY == 2 else CAPACITY
        for k in tl.static_range(8):
            total = total * 3 + tl.load(state_ptr + slot * stride + k * step)
        for k in tl.static_range(8, 16):
            total += (tl.load(state_ptr + slot * stride + k * step) == token).to(tl.int32)
    tl.debug_barrier()
    if WAY < 2:
        values = tl.where(half < 5, total[:, None] + half, 0)
        tl.store(state_ptr + slot[:, None] * 16 + half, values)
    else:
        for k in tl.static_range(5):
            tl.store(state_ptr + slot * stride + k * step, total + k)


def count(way: int) -> Any:
    """Stats of one launch over ROWS slots in random order."""
    signature = {"state_ptr": "*i32", "slots_ptr": "*i32", "token_ptr": "*i32"}
    constants = {"CAPACITY": CAPACITY, "BLOCK": BLOCK, "WAY": way}
    kernel = ptxsim.compile(touch_kernel, signature, constants, arch=ARCH, num_warps=WARPS, aligned="pointers")
    random = np.random.default_rng(0)
    state = random.integers(0, 1000, CAPACITY * 16).astype(np.int32)
    slots = random.permutation(CAPACITY)[:ROWS].astype(np.int32)
    return kernel.launch((ROWS // BLOCK,), state, slots, np.arange(ROWS, dtype=np.int32), races="raise")


def main() -> None:
    """Print the table."""
    print("| arrangement | instructions a row | load bytes a row | store bytes a row | distinct bytes a row |")
    print("| --- " * 5 + "|")
    for name, way in WAYS.items():
        stats = count(way)
        numbers = (
            stats.warp_instructions, 32 * stats.load_sectors, 32 * stats.store_sectors, stats.compulsory_bytes,
        )  # fmt: skip
        print(f"| {name} | " + " | ".join(f"{number / ROWS:.1f}" for number in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
