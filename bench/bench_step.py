"""Time of a decode step's output, at the scheduler and at the receiver, against what engines do today.

    python bench/bench_step.py [--quick] [--only QUESTION] [--peers NAME,NAME] [--json FILE]

Runs the cases of `questions.py` under `harness.py`, which says what the clocks include; writes the rows, prints
the goals. Run it on a quiet machine: where others wait for the cores, long steps are interrupted and short ones
are not, which flatters gpupack.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

# With PYTHONSAFEPATH=1, which keeps kernels/ from shadowing another package, this folder is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from goals import goals_table
from harness import Harness
from peers import PEERS
from questions import cases, quick_cases
from rows import RESULTS, write_rows


def main() -> None:
    """Run, write the rows, print the goals."""
    parser = argparse.ArgumentParser(description="output of a decode step, against what engines do today")
    parser.add_argument("--quick", action="store_true", help="fewer cases and samples; no figures to quote")
    parser.add_argument("--only", help="one question")
    parser.add_argument("--peers", default=",".join(PEERS), help="names, joined by commas")
    parser.add_argument("--json", type=Path, default=RESULTS / "bench_step.jsonl", help="file for the rows")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    with Harness(options.peers.split(","), quick=options.quick) as harness:
        for case in quick_cases() if options.quick else cases():
            if options.only in (None, case.question):
                started = time.monotonic()
                rows += list(harness.rows(case))
                print(f"{time.monotonic() - started:5.1f} s  {case.question}: {case.work}", flush=True)
    write_rows(options.json, rows)
    print(goals_table(rows))
    machine = "{cpu}, {cores} cores, load {load_1m} at the start".format(**rows[0])
    print(f"\n{machine}; {time.monotonic() - began:.0f} s; rows in {options.json}")


if __name__ == "__main__":
    main()
