"""Reading what a launch takes in: launch words, addresses of the inputs, control rows, token ids of either width."""

from __future__ import annotations

import triton
import triton.language as tl
from gpupack.kernels import constants as C
from gpupack.kernels.rule import INT32_MAX, INT32_MIN, rows_if


@triton.jit
def launch_word(control_ptr, FIELD: tl.constexpr):
    """A launch word; the same for all programs."""
    return tl.load(control_ptr + FIELD)


@triton.jit
def address(control_ptr, INPUT: tl.constexpr):
    """Where an input lies, int64; 0: there is none."""
    words_ptr = control_ptr + C.LAUNCH_ADDRESSES + 2 * INPUT
    return tl.load(words_ptr.to(tl.pointer_type(tl.int64)))


@triton.jit
def words_at(control_ptr, INPUT: tl.constexpr):
    """An input as int32 words, whatever its type."""
    return address(control_ptr, INPUT).to(tl.pointer_type(tl.int32))


@triton.jit
def control_row(control_ptr, FIELD: tl.constexpr, batch, offs_row, mask_row, UNSET: tl.constexpr):
    """Control word FIELD of the block's rows, `[BLOCK]`; UNSET where there is none."""
    return tl.load(control_ptr + C.LAUNCH_WORDS + FIELD * batch + offs_row, mask=mask_row, other=UNSET)


@triton.jit
def load_run(control_ptr, offs_row, batch, mask_run, ACCEPT: tl.constexpr):
    """Accepted tokens in 32 bits, `[BLOCK, ACCEPT]`; an id that does not fit stays out of every vocabulary."""
    step = launch_word(control_ptr, C.LAUNCH_TOKEN_STEP)
    stride = launch_word(control_ptr, C.LAUNCH_TOKEN_STRIDE)
    ids_ptr = words_at(control_ptr, C.ADDRESS_TOKEN_IDS)
    offs = (offs_row[:, None].to(tl.int64) * stride + tl.arange(0, ACCEPT)[None, :]) * step
    low = tl.load(ids_ptr + offs, mask=mask_run, other=0)
    wide = rows_if(step - 1, offs_row, batch)[:, None]
    high = tl.load(ids_ptr + offs + 1, mask=mask_run & wide, other=0)
    beyond = wide & (high != (low >> 31))
    return tl.where(beyond, tl.where(high < 0, INT32_MIN, INT32_MAX), low)


@triton.jit
def load_lens(control_ptr, INPUT: tl.constexpr, offs_row, batch, mask_row):
    """Lengths of the block's rows, `[BLOCK]`; 0 where there are none."""
    at = address(control_ptr, INPUT)
    mask = mask_row & rows_if(at, offs_row, batch)
    return tl.load(at.to(tl.pointer_type(tl.int32)) + offs_row, mask=mask, other=0)
