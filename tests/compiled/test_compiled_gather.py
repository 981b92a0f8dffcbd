"""The compiled gather kernel under random schedules: equal to the reference, no overrun, no race.

Sizes lie on both sides of every tile: 1024 words a program, of one row or of several.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import numpy as np
import ptxsim_runtime
import pytest
import torch
from gather_cases import Source, gather_is_right, rows_outside_are_left_alone
from gpupack.kernels import aot
from gpupack.kernels import gather_rows as module
from gpupack.kernels.gather_rows import THREADS, TILE, gather_rows_kernel, gather_shape
from ptxsim import MemoryFault, RaceError
from ptxsim_runtime import PtxSimRuntime

from gpupack.core import layout as L
from gpupack.streamer.embeddings import EmbeddingGather

ROUNDS = 4 if int(os.environ.get("GPUPACK_BATCHES", "540")) < 1000 else 40
ARCHS = (80, 90, 100)
SCHEDULES = ("random", "reverse", "sequential")
OUTSIDE = [-1, -(2**31), 2**31 - 1]

# Rows of 1024 words and less share a program, longer ones take several; 16-bit words where a width, a gap
# or an address is odd.
SOURCES = {
    "one value": Source("float32", 1, 2 * TILE + 3),
    "odd width": Source("bfloat16", 7, 300),
    "pairs of 16 bits": Source("float16", 12, 150, gap=2),
    "odd gap": Source("float16", 12, 150, gap=1),
    "odd address": Source("bfloat16", 12, 150, gap=2, shift=1),
    "just under a tile": Source("float32", TILE - 1, 5, gap=1),
    "a tile": Source("float32", TILE, 5, shift=3),
    "just over a tile": Source("bfloat16", TILE + 1, 4),
    "two tiles and a pair": Source("float16", 4 * TILE + 2, 3),
}


@pytest.mark.parametrize("name", SOURCES)
def test_equals_the_reference(name: str) -> None:
    kind = SOURCES[name]
    rng = np.random.default_rng(len(name))
    block = gather_shape(kind.words).block
    for arch in ARCHS if name in ("odd width", "a tile") else (90,):
        runtime = PtxSimRuntime(arch, seed=arch)
        gather = EmbeddingGather(kind.width, kind.dtype, max_batch=2 * block + 1, runtime=runtime)
        counts = ROUNDS * sorted({1, block - 1, block, block + 1, 2 * block + 1} - {0})
        for number, count in enumerate(counts):
            runtime.schedule = SCHEDULES[number % len(SCHEDULES)]
            gather_is_right(gather, kind.tensor(rng), rng.integers(0, kind.rows, count, np.int32))
        programs = [-(-count // block) * -(-kind.words // TILE) for count in counts]
        assert [launched for launched, _ in runtime.launches] == programs, "one launch each, of these programs"


@pytest.mark.parametrize("name", ["odd width", "just over a tile"])
def test_rows_outside_the_source_are_left_alone(name: str) -> None:
    kind = SOURCES[name]
    rng = np.random.default_rng(3)
    runtime = PtxSimRuntime(90, seed=3)
    block = gather_shape(kind.words).block
    for count in (1, block, block + 1):
        for outside in (*OUTSIDE, kind.rows):
            rows = rng.integers(0, kind.rows, count, np.int32)
            rows[rng.integers(0, count)] = outside
            rows_outside_are_left_alone(runtime, kind.tensor(rng), rows)


def far_row(kernel: Any) -> tuple[str, int]:
    """Argument and word where a launch for row 3 of rows 2^30 words apart faults: only the numbers are real."""
    runtime = PtxSimRuntime(90)
    source = Source("float32", 8, 1).tensor(np.random.default_rng(1)).view(torch.int32)
    launch = runtime.host(L.GATHER_WORDS + 1, torch.int32)
    launch.numpy()[: L.GATHER_ERROR] = 1, 4, 2**30
    launch.numpy()[L.GATHER_WORDS] = 3
    constants = {"WIDTH": 8, "BLOCK": 1, "COLUMNS": 8}
    with pytest.raises(MemoryFault) as fault:
        runtime.launch(kernel, 1, (source, launch, runtime.host(8, torch.int32)), constants, THREADS // 32)
    return fault.value.arg, fault.value.offset // L.WORD


def test_addresses_are_computed_in_64_bits() -> None:
    arg, word = far_row(gather_rows_kernel)
    assert (arg, word // 2**30) == ("source_ptr", 3)


def test_neither_count_nor_address_chooses_a_variant() -> None:
    """In a serving loop nothing may compile: 32-bit and 16-bit words are the only two variants of a width."""
    runtime = PtxSimRuntime(90)
    rng = np.random.default_rng(2)
    gather = EmbeddingGather(12, "float16", max_batch=40, runtime=runtime)
    before = ptxsim_runtime.compiled.cache_info().misses
    for shift, gap, count in ((0, 0, 1), (2, 4, 16), (4, 2, 7), (8, 6, 32), (1, 0, 1), (0, 3, 16), (5, 5, 40)):
        kind = Source("float16", 12, 40, gap, shift)
        gather_is_right(gather, kind.tensor(rng), rng.integers(0, 40, count, np.int32))
    assert ptxsim_runtime.compiled.cache_info().misses - before <= 2


MUTATIONS = {
    "columns without a bound": ("& (offs_column < WIDTH)[None, :]", "& (offs_column >= 0)[None, :]"),
    "rows without a bound": ("mask_row = offs_row < count", "mask_row = offs_row < count + BLOCK"),
    "row numbers without a bound": ("(index >= 0) & (index < rows)", "index >= 0"),
    "row numbers without a sign": ("(index >= 0) & (index < rows)", "index < rows"),
}


def changed(old: str, new: str, folder: Path) -> Any:
    """The kernel of a changed source; Triton reads it from its file."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, "the piece is in the kernel"
    path = folder / "changed_gather.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("changed_gather", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.gather_rows_kernel


def live(kernel: Any) -> None:
    """Gathers on both sides of a tile, and row numbers outside the source, with everything checked."""
    rng = np.random.default_rng(9)
    runtime = PtxSimRuntime(90, edit=lambda _: kernel)
    for kind in (Source("float32", 300, 9, gap=1), Source("float32", TILE + 300, 9)):
        gather = EmbeddingGather(kind.width, kind.dtype, max_batch=9, runtime=runtime)
        for count in (1, 2, 9):
            gather_is_right(gather, kind.tensor(rng), rng.integers(0, kind.rows, count, np.int32))
    for outside in (*OUTSIDE, kind.rows):
        rows_outside_are_left_alone(runtime, kind.tensor(rng), np.array([4, outside, 8], np.int32))


def test_the_kernel_as_it_is_passes(tmp_path: Path) -> None:
    live(changed("# [BLOCK]\n", "# [BLOCK]\n", tmp_path))


@pytest.mark.parametrize("name", MUTATIONS)
def test_taking_out_a_bound_is_noticed(name: str, tmp_path: Path) -> None:
    kernel = changed(*MUTATIONS[name], tmp_path)
    with pytest.raises((AssertionError, RaceError, MemoryFault)):
        live(kernel)


def test_32_bit_addresses_are_noticed(tmp_path: Path) -> None:
    kernel = changed("index.to(tl.int64)[:, None] * stride", "index[:, None] * stride.to(tl.int32)", tmp_path)
    assert far_row(kernel) != far_row(gather_rows_kernel)


@pytest.mark.parametrize("variant", list(aot.gather_variants()), ids=lambda variant: "-".join(map(str, variant)))
def test_fits_its_limits(variant: aot.GatherVariant) -> None:
    taken = aot.resources(variant)
    assert taken.spills == taken.local == 0
    assert 0 < taken.registers <= aot.MAX_GATHER_REGISTERS
    assert taken.shared <= 4096
