"""Checks and times everything that needs a GPU, in less than four minutes: `python bench/device_check.py`.

Without CUDA it says so and runs the same code under Triton's interpreter at a small size; its times mean
nothing then. Needs Python, torch, triton, NumPy and this tree, installed or not; Numba if the CPU backend is
to be the reference and to be timed, else `tests/oracle.py` is it. No zmq, no msgspec.

Parts: random lives against the reference; frames read at their event behind long kernels; the steady state
under `torch.cuda.set_sync_debug_mode("error")` with its compilations counted; times. Prints tables, writes a
JSON row for each check and each time, and exits with 1 if a check failed. A missed goal is no failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves the script's folder out
from device_place import ROOT, Place, make_importable

make_importable()
from device_report import Budget, all_passed, calls_table, checks_table, goals_table, times_table  # noqa: E402
from rows import Row, write_rows  # noqa: E402

TOTAL_S, WATCHDOG_S = 215.0, 235.0
PARTS = {"lives": 90.0, "soak": 30.0, "steady": 30.0, "times": 110.0}  # seconds at most; what one leaves, others have


class Sizes(NamedTuple):
    """How much is done."""

    steps: int
    seeds: int
    soak_steps: int
    steady_steps: int
    batches: tuple[int, ...]
    accepts: tuple[int, ...]
    tops: tuple[int, ...]
    rounds: int
    chain: int


FULL = Sizes(10_000, 4, 8_000, 600, (1, 64, 256, 1024, 4096), (1, 4), (0, 5, 20), 100, 21)
SMALL = Sizes(20, 1, 2, 6, (1, 64), (1,), (0, 5), 1, 3)


def parts(place: Place, sizes: Sizes) -> dict[str, Callable[[Callable[[], float]], Iterator[Row]]]:
    """The parts by name; they load Triton, so not before the place was chosen."""
    import device_lives
    import device_soak
    import device_steady
    import device_times

    timed = device_times.Sizes(sizes.batches, sizes.accepts, sizes.tops, sizes.rounds, sizes.chain)
    return {
        "lives": lambda left: device_lives.run(place, sizes.steps, sizes.seeds, left),
        "soak": lambda left: device_soak.run(place, sizes.soak_steps, left),
        "steady": lambda left: device_steady.run(place, sizes.steady_steps, left),
        "times": lambda left: device_times.run(place, timed, left),
    }


def run_part(name: str, part: Iterator[Row], about: Row, rows: list[Row]) -> None:
    """Add a part's rows as they come, each said; an error ends the part, not the run, and is a failed check."""
    began = time.monotonic()
    try:
        for row in part:
            add(rows, {**about, "part": name, **row})
        add(rows, {**about, "part": name, "check": f"{name}: ran to its end", "passed": True, "detail": ""})
    except Exception as error:  # whatever it is: the others still run
        traceback.print_exc()
        detail = f"{type(error).__name__}: {error}".replace("\n", " ")
        add(rows, {**about, "part": name, "check": f"{name}: ran to its end", "passed": False, "detail": detail})
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def add(rows: list[Row], row: Row) -> None:
    """Keep a row; a failed check is said at once."""
    rows.append(row)
    if not row.get("passed", True):
        print(f"FAILED {row['part']}: {row['check']}: {row['detail']}", flush=True)


def finish(rows: list[Row], out: Path) -> int:
    """Print the tables, write the rows; the exit status."""
    write_rows(out, rows)
    for table in (checks_table(rows), times_table(rows), calls_table(rows), goals_table(rows)):
        print(f"\n{table}", flush=True)
    print(f"\nMicroseconds: median (20th to 80th percentile). {len(rows)} rows in {out}")
    if not any(row["device"] == "cuda" for row in rows):
        print("Under the interpreter: the checks count, the times mean nothing.")
    passed = all_passed(rows)
    print("All checks passed." if passed else "NOT all checks passed.", flush=True)
    return 0 if passed else 1


def watch(rows: list[Row], about: Row, out: Path, seconds: float) -> threading.Timer:
    """End the process with what there is if it hangs: a kernel that never ends cannot be interrupted."""

    def give_up() -> None:
        add(rows, {**about, "part": "all", "check": "ran in time", "passed": False, "detail": f"{seconds:.0f} s"})
        finish(list(rows), out)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    return timer


def commit() -> str:
    """The commit of this tree, with a mark if it was changed; "unknown" outside of a repository."""
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+changes", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(arguments: list[str] | None = None) -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description="Check and time the device side of gpupack.")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of " + ", ".join(PARTS))
    parser.add_argument("--small", action="store_true", help="the interpreter's sizes, on CUDA too")
    parser.add_argument("--oracle", action="store_true", help="tests/oracle.py as the reference, as without Numba")
    parser.add_argument("--out", type=Path, help="where the rows go; bench/results on CUDA, else build/")
    asked = parser.parse_args(arguments)
    import torch

    place = Place(cuda=torch.cuda.is_available())
    place.numba = place.numba and not asked.oracle
    if not place.cuda:
        print("There is no CUDA device: running under Triton's interpreter, at a small size.")
    folder = ROOT / "bench" / "results" if place.cuda else ROOT / "build"
    out = asked.out or folder / "device_check.jsonl"
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about: dict[str, Any] = {**place.about(), "commit": commit(), "date": now}
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    rows: list[Row] = []
    budget = Budget(TOTAL_S if place.cuda else 600.0)
    timer = watch(rows, about, out, WATCHDOG_S if place.cuda else 900.0)
    todo = parts(place, SMALL if asked.small or not place.cuda else FULL)
    for name in asked.parts.split(","):
        run_part(name, todo[name](budget.part(PARTS[name] if place.cuda else 300.0)), about, rows)
    timer.cancel()
    return finish(rows, out)


if __name__ == "__main__":
    sys.exit(main())
