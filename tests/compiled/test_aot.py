"""Every variant compiles for every target and keeps the committed limits."""

from __future__ import annotations

import pytest
import triton
from gpupack.kernels import aot
from gpupack.kernels.launch import MAX_DEVICE_ACCEPT

# The limits are those of the compiler in constraints.txt. Older ones have to compile everything, and to
# do without local memory; 3.6 keeps two scalar registers of one gfx942 variant in vector lanes.
CURRENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


@pytest.mark.parametrize("variant", list(aot.variants()), ids=lambda variant: "-".join(map(str, variant)))
def test_fits_its_limits(variant: aot.Variant) -> None:
    taken = aot.resources(variant)
    assert taken.size > 0
    if CURRENT:
        records = variant.channels in ("top-k", "all")
        if variant.target == "gfx942":  # scalar registers are kept in lanes of vector registers: nothing goes to memory
            assert taken.local == 0
        else:
            assert taken.spills <= aot.MAX_SPILLS
        most = aot.MAX_RECORD_REGISTERS if records else aot.MAX_REGISTERS[variant.max_accept]
        assert 0 < taken.registers <= most
        assert 0 < taken.shared <= 8192


@pytest.mark.skipif(not CURRENT, reason="the limits are those of the current Triton")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("max_accept", [16, MAX_DEVICE_ACCEPT])
def test_long_runs_spill_next_to_nothing(target: str, max_accept: int) -> None:
    taken = aot.resources(aot.Variant(target, "logprobs", max_accept, "default"))
    assert taken.spills <= aot.MAX_SPILLS
