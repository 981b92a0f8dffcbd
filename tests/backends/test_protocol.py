"""The device protocol on a simulated device: random schedules, and every guard is missed when it is taken out."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from guards import GUARDS
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from protocol_life import OPS, DeviceLife
from simulated import SimulatedRuntime

from gpupack.backends.cuda.backend import TritonBackend
from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import GpupackError
from gpupack.packer.packer import Packer

SCHEDULES = int(os.environ.get("GPUPACK_SCHEDULES", "5000"))
ENOUGH = 2000  # schedules notice every missing guard, most of them within 100
CHOICES = [op for op, weight in OPS.items() for _ in range(weight)]

seeds = st.integers(0, 2**32 - 1)
schedules = st.lists(st.sampled_from(CHOICES), min_size=4, max_size=32)


@given(seed=seeds, ops=schedules)
@settings(max_examples=SCHEDULES)
def test_no_schedule_breaks_the_protocol(seed: int, ops: list[str]) -> None:
    life = DeviceLife(seed)
    life.live(ops)
    event(life.config.transfer)
    event("one stream" if life.runtime.own is life.runtime.engine else "a stream of its own")


def test_a_full_ring_waits_for_a_reader_on_another_thread() -> None:
    config = PackerConfig(vocab_size=8, capacity=4, max_in_flight=1, ring_timeout_s=60.0)
    packer = Packer(config)
    packer.backend = TritonBackend(config, SimulatedRuntime(0))
    nothing = np.empty(0, np.int64)
    first, _ = [packer.pack(nothing).wait() for _ in range(config.buffers)]
    begin = time.monotonic()
    threading.Timer(0.05, first.release).start()
    third = packer.pack(nothing).wait()
    assert 0.04 < time.monotonic() - begin < 30, "it waited for the release, and no longer"
    assert third.header(L.H_LAUNCH) == 3


@pytest.mark.parametrize("name", GUARDS)
def test_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = GUARDS[name]
    monkeypatch.setattr(guard.owner, guard.name, guard.taken_out())
    count = 0

    @given(seed=seeds, ops=schedules)
    @settings(max_examples=ENOUGH, database=None, derandomize=True, phases=[Phase.generate])
    def live(seed: int, ops: list[str]) -> None:
        nonlocal count
        count += 1
        DeviceLife(seed).live(ops)

    with pytest.raises((AssertionError, GpupackError)) as caught:
        live()
    print(f"{name}: after {count} schedules: {caught.typename} {str(caught.value)[:70]!r}")
