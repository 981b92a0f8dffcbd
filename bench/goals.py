"""The goals, and what a run has measured for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lookup import Rows
from questions import ENGINE
from rows import Row
from workload import Workload

OURS = "gpupack"
SCHEDULER = ((ENGINE, "scheduler"), (OURS, "scheduler"))
FASTER = {1: 1.0, 64: 10.0, 256: 40.0, 1024: 120.0, 4096: 250.0}
FASTER_TOP = {256: 40.0, 1024: 80.0, 4096: 150.0}


class Goal(NamedTuple):
    """What is to be reached, and what was: at least the goal, or at most where `most` is set."""

    text: str
    goal: float
    measured: float | None
    most: bool = False

    @property
    def reached(self) -> bool:
        """Whether it was measured and reached."""
        if self.measured is None:
            return False
        return self.measured <= self.goal if self.most else self.measured >= self.goal


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """All goals of a run; ratios are medians over medians, of workloads that were measured in turns."""
    found = Rows(rows)
    for batch, goal in FASTER.items():
        yield Goal(f"scheduler, B={batch}", goal, found.ratio("batch", Workload(batch), *SCHEDULER))
    for batch, goal in FASTER_TOP.items():
        work = Workload(batch, logprobs="top-5")
        yield Goal(f"scheduler, top-5 logprobs, B={batch}", goal, found.ratio("logprobs", work, *SCHEDULER))
    for batch, goal in FASTER.items():
        if batch > 1:
            work = Workload(batch, host_judged=1.0)
            measured = found.ratio("host-judged", work, *SCHEDULER)
            yield Goal(f"scheduler, all host-judged, B={batch}", goal / 2, measured)
    for stage, goal in (("views", 20.0), ("deltas", 4.0)):
        measured = found.ratio("batch", Workload(1024), (ENGINE, "deltas"), (OURS, stage))
        yield Goal(f"receiver, {stage}, B=1024", goal, measured)
    for batch in (64, 256, 1024, 4096):
        measured = found.ratio("batch", Workload(batch), *SCHEDULER, name="bytes_per_token")
        yield Goal(f"fewer bytes per output token, B={batch}", 5.0, measured)
    floor = found.ratio("batch", Workload(4096), (OURS, "scheduler"), ("floor", "scheduler"))
    yield Goal("times the host floor, B=4096 (at most)", 10.0, floor, most=True)
    for batch in (1, 8, 64, 256, 1024):
        measured = found.ratio("interval", Workload(batch, interval=50), *SCHEDULER)
        yield Goal(f"scheduler, interval 50, B={batch}", 1.0 if batch >= 64 else 0.0, measured)
    hop = found.one("hop", Workload(256, rate=1000), OURS, "hop")
    tail = None if hop is None else hop["p99_us"] / hop["p50_us"]
    yield Goal("p99 over p50 of the hop, 1,000 steps/s, B=256 (at most)", 2.0, tail, most=True)


def goals_table(rows: Sequence[Row]) -> str:
    """Goal, measured, reached; for a goal of 0 the figure is only reported."""
    lines = [f"| times faster than {ENGINE}, default wire, unless said otherwise | goal | measured | |"]
    lines.append("| --- | ---: | ---: | --- |")
    for goal in goals(rows):
        measured = "not measured" if goal.measured is None else f"{goal.measured:.1f}"
        wanted, verdict = f"{goal.goal:g}", "reached" if goal.reached else "missed"
        if not goal.goal or goal.measured is None:
            wanted, verdict = wanted if goal.goal else "reported", ""
        lines.append(f"| {goal.text} | {wanted} | {measured} | {verdict} |")
    return "\n".join(lines)
