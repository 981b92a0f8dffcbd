"""Rows of a `[rows, D]` tensor by an index list, compacted into memory that the host reads: one launch, bit copies.

The kernel moves words and knows no dtype: of 32 bits where width, row stride and address allow, else of
16. `reference` says what it does; the tests hold both to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from gpupack.kernels import constants as C
from gpupack.kernels.launch import power_of_two
from numpy.typing import NDArray
from torch import Tensor

from gpupack.backends.cuda.runtime import DeviceRuntime
from gpupack.core import layout as L

TILE = 1024  # words a program
THREADS = 128


class GatherShape(NamedTuple):
    """Rows a program, and words of each of them, both powers of two."""

    block: int
    columns: int


def reference(source: NDArray[Any], index: NDArray[np.int32], out: NDArray[Any]) -> bool:
    """`out[i] = source[index[i]]`; a row outside the source is left alone. Whether there was one."""
    outside = False
    for i, row in enumerate(index.tolist()):
        if 0 <= row < len(source):
            out[i] = source[row]
        else:
            outside = True
    return outside


# The source lies wherever the model put it: its alignment must not choose a variant. What changes from
# step to step stands in memory, so nothing else can.
@triton.jit(do_not_specialize_on_alignment=["source_ptr"])
def gather_rows_kernel(
    source_ptr,  # int32 or int16 words [rows, WIDTH], of any row stride
    launch_ptr,  # int32: launch words (layout.GATHER_FIELDS), then row numbers [count]
    out_ptr,  # the same words [count, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy COLUMNS words of BLOCK rows; see the module."""
    chunks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    count = tl.load(launch_ptr + C.GATHER_COUNT)
    rows = tl.load(launch_ptr + C.GATHER_ROWS)
    stride = tl.load(launch_ptr + C.GATHER_STRIDE).to(tl.int64)
    program = tl.program_id(0)
    offs_row = program // chunks * BLOCK + tl.arange(0, BLOCK)
    offs_column = program % chunks * COLUMNS + tl.arange(0, COLUMNS)
    mask_row = offs_row < count
    index = tl.load(launch_ptr + C.GATHER_WORDS + offs_row, mask=mask_row, other=0)  # [BLOCK]
    inside = (index >= 0) & (index < rows)
    # Whoever meets an error stores the same word, so no order between them matters.
    tl.store(launch_ptr + C.GATHER_ERROR + offs_row * 0, 1, mask=mask_row & ~inside)
    mask = (mask_row & inside)[:, None] & (offs_column < WIDTH)[None, :]
    source = index.to(tl.int64)[:, None] * stride + offs_column[None, :]
    words = tl.load(source_ptr + source, mask=mask)  # [BLOCK, COLUMNS]
    tl.store(out_ptr + offs_row.to(tl.int64)[:, None] * WIDTH + offs_column[None, :], words, mask=mask)


def word_dtype(width: int, stride: int, address: int, itemsize: int) -> torch.dtype:
    """The widest words, int32 or int16, that rows of `width` items of `itemsize` bytes can be copied in."""
    whole = not (width * itemsize % 4 or stride * itemsize % 4 or address % 4)
    return torch.int32 if whole else torch.int16


def gather_shape(width: int) -> GatherShape:
    """The tile for rows of `width` words."""
    columns = min(power_of_two(width), TILE)
    return GatherShape(TILE // columns, columns)


def gather_rows(runtime: DeviceRuntime, source: Tensor, launch: Tensor, out: Tensor, count: int) -> None:
    """Enqueue the copy of `count` rows on the runtime's stream. Does not synchronise or allocate device memory.

    Parameters
    ----------
    source
        `[rows, D]` on the device, of items of 2 or 4 bytes; the last dimension contiguous.
    launch
        int32 `[GATHER_WORDS + count]` or longer, memory that host and kernel reach: row numbers behind
        the launch words, which are written here. The kernel sets the error word.
    out
        int32, at least `count * D` items' bytes, memory that host and kernel reach. The rows go to
        its beginning, without gaps.
    """
    rows, items = source.shape
    stride, size = source.stride(0), source.element_size()
    words = word_dtype(items, stride, source.data_ptr(), size)
    header: NDArray[np.int32] = launch.numpy()
    header[: L.GATHER_ERROR + 1] = count, rows, stride * size // words.itemsize, 0
    if not count:
        return
    width = items * size // words.itemsize
    block, columns = gather_shape(width)
    programs = -(-count // block) * -(-width // columns)
    view = source.as_strided((rows, items), (stride, 1)).view(words)
    runtime.launch(gather_rows_kernel, programs, (view, launch, out.view(words)), *_variant(runtime, width))


def prepare_gather(runtime: DeviceRuntime, width: int, itemsize: int, launch: Tensor, out: Tensor) -> None:
    """Compile all that `gather_rows` may launch for rows of `width` items of `itemsize` bytes; memory as for it."""
    aligned = word_dtype(width, width, 0, itemsize)
    for words in {aligned, word_dtype(width, width, itemsize, itemsize)}:
        arguments = (out.view(words), launch, out.view(words))
        runtime.prepare(gather_rows_kernel, arguments, *_variant(runtime, width * itemsize // words.itemsize))


def _variant(runtime: DeviceRuntime, width: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments for rows of `width` words, and warps."""
    block, columns = gather_shape(width)
    return {"WIDTH": width, "BLOCK": block, "COLUMNS": columns}, max(THREADS // runtime.lanes, 1)
