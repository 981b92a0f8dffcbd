"""Time of a decode step's output at the scheduler and at the receiver, against the per-request loop.

One run takes both variants in turn (A B, B A, …) over the same requests and tokens, in one process;
their contents are compared before anything is timed. A sample is the mean over `interval`
consecutive steps; reported are medians with the 20th and 80th percentile. What the clock includes:

- scheduler, gpupack: `Packer.step` and `OutputStreamer.send`, down to the hand-over to a zmq ipc socket;
- scheduler, loop: the loop, `pickle.dumps`, a send to the same kind of socket. Appending the tokens to
  the requests' lists is not included, which gpupack's step does include;
- receiver: from the bytes of a message to verified column views or to per-request deltas, and
  `pickle.loads`.

Not included: sampling, the tokens' way to the host (for both they are there), the receiver's socket.
Freeing the decoded messages is not included either. Everything runs on the CPU; torch is not loaded.

Between two steps of the scheduler side the process waits until the message was taken, as an engine
waits for its model: caches and zmq's thread are as cold as that makes them. `no_socket` is the same
work in a tight loop, without the hand-over. Each variant has a zmq context of its own, as it comes.

The garbage collector is on, as it is in engines. With logprobs and thousands of requests its full
collections come more often here than in an engine's larger heap, and fall on the loop: look at the
20th percentile there. Run it on a quiet machine: where others wait for the cores, long steps are
interrupted and short ones are not, which flatters gpupack.

    python bench/bench_step.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

# With PYTHONSAFEPATH=1, which keeps kernels/ from shadowing another package, this folder is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import zmq
from drain import Drain
from receiver_paths import LoopReceivePath, PackedReceivePath
from rows import RESULTS, Row, environment, quantiles, write_rows
from scheduler_paths import LoopPath, PackedPath
from step_table import table
from workload import Case, Sampled, Sent
from workload import Path as OutputPath

from gpupack.transport.sender import OutputSender

BATCHES = (1, 64, 256, 1024, 4096)
INTERVALS = (1, 8, 50)
QUICK_INTERVALS = (1, 8)
WARM_STEPS = 4  # after the last request has joined
ROUND_STEPS = 4  # at least, and a whole interval


class Tally:
    """Samples of one path, by stage."""

    def __init__(self, path: OutputPath, interval: int) -> None:
        self.path = path
        self.interval = interval
        self.stages: dict[str, list[float]] = {stage: [] for stage in path.stages}
        self.totals: list[float] = []
        self.rows = self.bytes = self.steps = 0

    def add(self, steps: list[Sent]) -> None:
        """One sample, from `interval` steps."""
        means = [sum(times) / len(steps) for times in zip(*(step.stages_ns for step in steps), strict=True)]
        for stage, mean in zip(self.stages, means, strict=True):
            self.stages[stage].append(mean)
        self.totals.append(sum(means))
        self.rows += sum(step.rows for step in steps)
        self.bytes += sum(step.size for step in steps)
        self.steps += len(steps)

    def row(self, variant: str, stage: str, samples: list[float]) -> Row:
        """The JSON row of a stage."""
        sizes = {
            "rows_per_step": round(self.rows / self.steps, 2),
            "bytes_per_row": round(self.bytes / max(self.rows, 1), 2),
        }
        return {"variant": variant, "stage": stage, **quantiles(samples), **sizes}


def measure(tallies: list[Tally], budget_s: float, min_rounds: int, settle: Drain | None) -> None:
    """Run the paths in turn, in an order that turns round each time, until the budget is spent."""
    deadline = time.monotonic() + budget_s
    rounds = 0
    while rounds < min_rounds or time.monotonic() < deadline:
        for tally in tallies if rounds % 2 else tallies[::-1]:
            for _ in range(max(1, ROUND_STEPS // tally.interval)):
                tally.add([run_step(tally.path, settle) for _ in range(tally.interval)])
        rounds += 1


def run_step(path: OutputPath, settle: Drain | None) -> Sent:
    """One step; then, outside of its time, wait until the receiving process has taken it."""
    sent = path.step()
    if settle is not None and sent.size:
        settle.wait()
    return sent


def receiver_rows(case: Case, sampled: Sampled, budget_s: float, min_rounds: int) -> Iterator[Row]:
    """Compare the contents of both variants, then time their receivers."""
    ours, loop = PackedReceivePath(case, sampled), LoopReceivePath(case, sampled)
    try:
        ours.keep_content = loop.keep_content = True
        for step in range(case.interval + WARM_STEPS):
            ours.step(), loop.step()
            if ours.content != loop.content:
                raise AssertionError(f"{case}, step {step}: the two variants sent different contents")
        ours.keep_content = loop.keep_content = False
        tallies = [Tally(ours, case.interval), Tally(loop, case.interval)]
        measure(tallies, budget_s, min_rounds, None)
    finally:
        ours.receiver.close()
    for variant, tally in zip(("gpupack", "loop"), tallies, strict=True):
        for stage, samples in tally.stages.items():
            yield tally.row(variant, stage, samples)


def scheduler_rows(case: Case, sampled: Sampled, budget_s: float, min_rounds: int) -> Iterator[Row]:
    """Time the scheduler's side of both variants, into a process that drains the socket."""
    with (
        zmq.Context() as context,
        Drain(context) as drain,
        OutputSender(drain.endpoint) as sender,
        context.socket(zmq.PUSH) as socket,
    ):
        socket.connect(drain.endpoint)
        ours, loop = PackedPath(case, sampled, sender), LoopPath(case, sampled, socket)
        for _ in range(case.interval + WARM_STEPS):
            run_step(ours, drain), run_step(loop, drain)
        tallies = [Tally(ours, case.interval), Tally(loop, case.interval)]
        measure(tallies, budget_s, min_rounds, drain)
        if sender.frames_merged:
            raise AssertionError(f"{case}: expected a receiver that keeps up, {sender.frames_merged} frames waited")
    for variant, tally in zip(("gpupack", "loop"), tallies, strict=True):
        for stage, samples in tally.stages.items():
            yield tally.row(variant, stage, samples)
        yield tally.row(variant, "scheduler", tally.totals)


def run(quick: bool) -> Iterator[Row]:
    """The rows of all cases."""
    budget_s, min_rounds = (0.2, 2) if quick else (2.0, 5)
    shared = environment()
    for logprobs in (False, True):
        for interval in QUICK_INTERVALS if quick else INTERVALS:
            for batch in BATCHES:
                case = Case(batch, interval, logprobs)
                sampled = Sampled(case)
                for side in (receiver_rows, scheduler_rows):
                    for row in side(case, sampled, budget_s, min_rounds):
                        yield {**shared, **asdict(case), **row}


def main() -> None:
    """Run, write the rows, print the table."""
    parser = argparse.ArgumentParser(description="output of a decode step, against a per-request loop with pickle")
    parser.add_argument("--quick", action="store_true", help="fewer cases and samples; no figures to quote")
    parser.add_argument("--json", type=Path, default=RESULTS / "bench_step.jsonl", help="file for the rows")
    options = parser.parse_args()
    began = time.monotonic()
    rows = list(run(options.quick))
    if "torch" in sys.modules:
        raise AssertionError("torch was loaded, which the rows say it was not")
    write_rows(options.json, rows)
    print(table(rows))
    machine = "{cpu}, {cores} cores, load {load_1m}".format(**rows[0])
    print(f"\n{machine}; {time.monotonic() - began:.0f} s; rows in {options.json}")


if __name__ == "__main__":
    main()
