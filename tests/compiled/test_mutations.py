"""The checks notice what they are there for: each piece taken out of the kernel makes them fail."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ptxsim_runtime
import pytest
from gpupack.kernels import inputs, items, pack, rule, scan
from ptxsim import DeadlockError, MemoryFault, RaceError
from twins import Case, Twins

from gpupack.core.config import PackerConfig
from gpupack.core.errors import StepFailedError

CONFIG = PackerConfig(
    vocab_size=60, eos_token_ids=(2, 7), capacity=75, window=8, max_accept=2, max_top_logprobs=2,
    max_token_ids_logprobs=1, speculative=True,
)  # fmt: skip
CASE = Case(CONFIG, 32, 4)  # three blocks of four warps
# Counters of a block that are fewer than its threads: some are read twice.
SMALL = Case(replace(CONFIG, capacity=11, max_batch=11, max_accept=1), 4, 4)
LAUNCHES = 24
WRONG = (AssertionError, RaceError, MemoryFault)  # whichever the life meets first


class Mutation(NamedTuple):
    """A piece of the source, what stands there instead, and how the checks notice."""

    old: str
    new: str
    noticed: type[BaseException] | tuple[type[BaseException], ...]
    times: int = 1
    case: Case = CASE


# Without `tl.debug_barrier()` alone nothing happens: of the reductions before it each has a barrier inside,
# today. So a store is put where there is none; it stores what was loaded.
EARLY_STORE = """    flags = field(hot, C.FLAGS)
    words = slot[:, None] * C.STATE_WIDTH + tl.arange(0, SECTOR)[None, :]
    tl.store(arena_ptr + words, hot, mask=mask_slot[:, None])
"""
MUTATIONS = {
    "no handle check": Mutation("(field(hot, C.GENERATION) == generation)", "(generation == generation)", WRONG),
    "ended slots are live": Mutation("& ((flags & C.STATE_LIVE) != 0)", "", WRONG),
    "a store with no barrier before it": Mutation("    flags = field(hot, C.FLAGS)\n", EARLY_STORE, RaceError),
    "sums published relaxed": Mutation('sem="release"', 'sem="relaxed"', RaceError),
    "sums polled relaxed": Mutation('sem="acquire"', 'sem="relaxed"', RaceError, 2),
    "nobody waits": Mutation("mask & ((word >> 32) != launch)", "mask & (word < 0)", RaceError),
    "waits for itself": Mutation("offs < block\n    pointer", "offs <= block + 1\n    pointer", DeadlockError),
    "launch number stays": Mutation("1, launch + 1)", "1, launch)", (StepFailedError, RaceError)),
    "handles without a mask": Mutation("offs_row, mask=mask_row, other=C.PADDING_HANDLE)", "offs_row)", WRONG),
    "slots without a bound": Mutation("(handle >= 0) & (slot < CAPACITY)", "handle >= 0", MemoryFault),
    "run without a mask": Mutation("ids_ptr + offs, mask=mask_run, other=0)", "ids_ptr + offs)", MemoryFault),
    "records without a mask": Mutation("offs, mask=mask & (word < top), other=0)", "offs)", MemoryFault),
    "records of the ring everywhere": Mutation("mask=kept, other=0)", "mask=mask, other=0)", WRONG),
    "counters with no barrier": Mutation(
        "    tl.debug_barrier()  # every warp has read the counters before one is written\n", "", RaceError, case=SMALL
    ),
    "counters of stale rows": Mutation("mask & counted[:, None])", "mask)", WRONG),
    "row column without a mask": Mutation("tl.where(finished, match, 0), mask=row)", "match)", WRONG),
    "state without a mask": Mutation("values, mask=taken[:, None])", "values, mask=mask_slot[:, None])", WRONG),
}


def kernel_source() -> str:
    """The pack kernel with all of its parts, as the source of one module."""
    parts = [inspect.getsource(module) for module in (rule, inputs, scan, items, pack)]
    own = re.compile(r"^from gpupack\.kernels\.(?:rule|inputs|scan|items) import (?:\([^)]*\)|.*)\n", re.MULTILINE)
    future = "from __future__ import annotations\n"
    return future + "".join(own.sub("", part).replace(future, "") for part in parts)


def kernel_of(source: str, folder: Path) -> Any:
    """The pack kernel of a changed source; Triton reads it from its file."""
    path = folder / "changed_pack.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("changed_pack", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pack_kernel


def live(kernel: Any, case: Case = CASE) -> None:
    """A random life on a kernel, with everything checked."""
    runtime = ptxsim_runtime.PtxSimRuntime(90, seed=7, edit=lambda _: kernel)
    twins = Twins(case, runtime, seed=5)
    for number in range(LAUNCHES):
        if number % 3 == 0:
            twins.churn()
        try:
            twins.launch()
        except StepFailedError as error:  # the packer's; what the simulator found is behind it
            raise error.__cause__ or error from None


def test_the_kernel_as_it_is_passes(tmp_path: Path) -> None:
    live(kernel_of(kernel_source(), tmp_path))


@pytest.mark.parametrize("name", MUTATIONS)
def test_is_noticed(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    source = kernel_source()
    assert source.count(mutation.old) == mutation.times, "the piece is in the kernel"
    with pytest.raises(mutation.noticed):
        live(kernel_of(source.replace(mutation.old, mutation.new), tmp_path), mutation.case)
