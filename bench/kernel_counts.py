"""What one launch of the pack kernel does, counted by the simulator: instructions, sectors, spins.

Counts, not times. The batch is a step of running requests whose slots come in random order, on a packer
in its stride: at interval 8 an eighth of the rows is due. `python bench/kernel_counts.py` prints the table
and writes `bench/results/kernel_counts.jsonl`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch

from gpupack.backends.cuda.backend import TritonBackend
from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.request import Request
from gpupack.core.step_inputs import StepInputs
from gpupack.packer.packer import Packer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "tests" / "compiled")]
from ptxsim_runtime import PtxSimRuntime  # noqa: E402
from rows import RESULTS, Row, environment, write_rows  # noqa: E402

SHAPES = ((32, 1), (32, 4), (64, 2), (128, 2), (128, 4), (256, 8))  # rows and warps a program
BATCHES = (64, 256, 1024)
INTERVALS = (1, 8)
ARCH = 90
SEEDS = 3  # what depends on the schedule (spins, polled words) is the mean of as many
EOS = (2, 7)
SECTOR = 32


class Workload(NamedTuple):
    """A step: rows, stream interval, whether the requests have logprobs."""

    batch: int
    interval: int
    logprobs: bool


def minimum_bytes(work: Workload) -> float:
    """Bytes that the step must read and write, from SPEC.md section 2 and 3, in no unit but bytes."""
    channels = 1 + work.logprobs
    due = 1 / work.interval
    inputs = 8 + 4 + 4 * channels  # handle, accepted length, the token and its logprob
    # Generation, flags, length, cursors, interval and cap decide; the stop ids are looked at.
    state_read = 4 * (5 + channels) + 4 * len(EOS)
    state_written = 4 + 4 * channels * due  # the length; the cursors of who sends
    row = L.WORD * L.ROW_WIDTH * due
    items = 4 * channels  # every token goes out once, now or later
    ring = 2 * 4 * channels * (1 - due)  # in, and out again
    return work.batch * (inputs + state_read + state_written + row + items + ring)


def in_stride(work: Workload) -> tuple[Packer, Any]:
    """A packer on the CPU whose requests have their first row behind them, and the handles of the batch."""
    config = PackerConfig(
        128_000, EOS, capacity=2 * work.batch, max_batch=work.batch, window=32, logprobs=work.logprobs
    )
    packer, random = Packer(config), np.random.default_rng(1)
    requests = [
        Request(f"r{i}", stream_interval=work.interval, return_logprob=work.logprobs) for i in range(config.capacity)
    ]
    handles = random.permutation(packer.admit(requests))[: work.batch]
    for step in range(work.interval + 2):  # begun one after the other, so that they are due one after the other
        begun = handles[np.arange(work.batch) % work.interval <= step]
        packer.step(begun, **inputs(work, len(begun))).wait().release()
    return packer, handles


def inputs(work: Workload, rows: int) -> dict[str, Any]:
    """One accepted token a row."""
    given: dict[str, Any] = {
        "token_ids": np.arange(rows, dtype=np.int32) + 1000,
        "accept_lens": np.ones(rows, np.int32),
    }
    if work.logprobs:
        given["logprobs"] = np.full(rows, -0.5, np.float32)
    return given


def count(work: Workload, block: int, warps: int) -> Row:
    """Counts of one launch, by row where that says more."""
    packer, handles = in_stride(work)
    runtime = PtxSimRuntime(ARCH)
    backend = TritonBackend(packer.config, runtime, block=block, warps=warps)
    arenas = packer.backend.arenas  # type: ignore[attr-defined]
    parts = [arenas.state, arenas.token_ring] + [arenas.logprob_ring] * work.logprobs
    arena = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
    given = {"logprobs": None, **inputs(work, work.batch)}
    mode = L.MODE_APPEND | L.MODE_PACK | L.MODE_LOGPROBS * work.logprobs
    for _ in range(SEEDS):
        backend.arena.copy_(arena)
        step = backend.step(handles, StepInputs(**given), None, mode)
        step.result().release()
    runs = [stats for _, stats in runtime.launches]
    minimum = minimum_bytes(work)

    def by_row(number: Any) -> float:
        return round(mean(map(number, runs)) / work.batch, 1)

    return {
        **work._asdict(),
        "block": block,
        "warps": warps,
        "instructions": by_row(lambda s: s.warp_instructions),
        "load_bytes": by_row(lambda s: SECTOR * s.load_sectors),
        "store_bytes": by_row(lambda s: SECTOR * s.store_sectors),
        "atomic_bytes": by_row(lambda s: SECTOR * s.atomic_sectors),
        "minimum_bytes": round(minimum / work.batch, 1),
        "traffic_ratio": round(mean(s.sector_bytes for s in runs) / minimum, 2),
        "distinct_ratio": round(mean(s.compulsory_bytes for s in runs) / minimum, 2),
        "spins": round(mean(s.spin_iterations for s in runs)),
        "barriers": round(mean(s.barriers for s in runs)),
    }


COLUMNS = {
    "batch": "B",
    "interval": "interval",
    "logprobs": "logprobs",
    "block": "block",
    "warps": "warps",
    "instructions": "instructions",
    "load_bytes": "loads",
    "store_bytes": "stores",
    "atomic_bytes": "atomics",
    "minimum_bytes": "minimum",
    "traffic_ratio": "sectors / minimum",
    "distinct_ratio": "distinct / minimum",
    "spins": "spins",
}


def cell(value: Any) -> str:
    """A value as it stands in the table."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def main() -> None:
    """Count everything, print the table, keep the rows."""
    here, rows = environment(), []
    print("Warp instructions and bytes (sectors times 32) a row of the batch; spins are of the launch.\n")
    print("| " + " | ".join(COLUMNS.values()) + " |")
    print("| --- " * len(COLUMNS) + "|")
    for batch in BATCHES:
        for interval in INTERVALS:
            for logprobs in (False, True):
                for block, warps in SHAPES:
                    row = count(Workload(batch, interval, logprobs), block, warps)
                    rows.append({**here, "arch": ARCH, **row})
                    print("| " + " | ".join(cell(row[name]) for name in COLUMNS) + " |", flush=True)
    write_rows(Path(RESULTS, "kernel_counts.jsonl"), rows)


if __name__ == "__main__":
    main()
