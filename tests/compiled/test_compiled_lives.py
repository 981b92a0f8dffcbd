"""The compiled kernel on random lives under random schedules: equal to the CPU backend, no race, no overrun.

`GPUPACK_BATCHES` is the number of batches over all cases and architectures; from 810 on it is also
checked that the lives met every kind of row.
"""

from __future__ import annotations

import os

import pytest
from gpupack.kernels.launch import BLOCK, THREADS
from ptxsim_runtime import PtxSimRuntime
from twins import Case, Twins

from gpupack.core.config import EmitPolicy, PackerConfig

BATCHES = int(os.environ.get("GPUPACK_BATCHES", "540"))
ARCHS = (80, 90, 100)
COMMON = {"vocab_size": 60, "eos_token_ids": (2, 7)}
OLD, NEW, FIRST = EmitPolicy.sglang_0_5_16(), EmitPolicy.sglang_0_5_23(), EmitPolicy(first_token_flush=True)
CASES = {
    "runs of 3": Case(PackerConfig(capacity=70, window=16, max_accept=3, **COMMON), 16, 1),
    "as launched": Case(PackerConfig(capacity=3 * BLOCK + 5, window=4, max_accept=1, **COMMON), BLOCK, THREADS // 32),
    "without logprobs": Case(PackerConfig(capacity=65, window=4, logprobs=False, **COMMON), 16, 1),
    "0.5.16, two warps": Case(PackerConfig(capacity=50, window=16, max_accept=4, policy=OLD, **COMMON), 16, 2),
    "0.5.23, four warps": Case(PackerConfig(capacity=70, window=4, policy=NEW, force_interval=5, **COMMON), 32, 4),
    "top-k, token ids, counters": Case(
        PackerConfig(
            capacity=40,
            window=16,
            max_accept=3,
            max_top_logprobs=3,
            max_token_ids_logprobs=2,
            family_window=8,
            speculative=True,
            **COMMON,
        ),
        16,
        1,
    ),
    "top-k, 0.5.23": Case(
        PackerConfig(capacity=70, window=8, max_top_logprobs=20, policy=NEW, force_interval=5, **COMMON), 32, 4
    ),
    "counters": Case(PackerConfig(capacity=33, window=8, max_accept=4, speculative=True, policy=OLD, **COMMON), 16, 2),
    "first token at once": Case(PackerConfig(capacity=33, window=8, max_accept=2, policy=FIRST, **COMMON), 32, 1),
}
SEEN = {"rows", "tokens", "stale", "late", "early", "held", "finished", "conveyed", "readmitted"}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu_backend(arch: int, name: str) -> None:
    case = CASES[name]
    runtime = PtxSimRuntime(arch, seed=1000 * arch)
    twins = Twins(case, runtime, seed=arch)
    batches = BATCHES // (len(ARCHS) * len(CASES))
    for number in range(batches):
        runtime.schedule = ("random", "random", "random", "reverse", "random", "sequential")[number % 6]
        if number % 3 == 0:
            twins.churn()
        twins.launch()
    if batches < 30:  # too short a life to meet everything
        return
    assert {key for key in SEEN if twins.seen[key]} == SEEN, "the life met every kind of row"
    programs = {count for count, _ in runtime.launches}
    assert programs >= {1, 2}
    assert len(programs) >= min(3, -(-case.config.capacity // case.block))
    assert any(stats.spin_iterations for _, stats in runtime.launches), "a block has waited for a lower one"
