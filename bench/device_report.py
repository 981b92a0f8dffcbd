"""What a run of device_check says: checks, times, and the goals with what was measured for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
NOT_MEASURED = "not measured"

# Columns of the table: variant, clock, title.
COLUMNS = (
    ("empty kernel", "device", "empty kernel"),
    ("kernel", "device", "kernel"),
    ("kernel, handles on the host", "device", "handles from the host"),
    ("step, mapped", "launch", "launch"),
    ("step, mapped", "visible", "visible, mapped"),
    ("step, copy", "visible", "copy"),
    ("step by graph", "visible", "by graph"),
    ("step, blocking wait", "visible", "blocking wait"),
    ("empty kernel, memcpy", "visible", "empty kernel, memcpy"),
    ("ids copied, packed on the host", "visible", "packed on the host"),
    ("copies for each request", "visible", "copies for each request"),
)
CALLS = ("JIT call", "pre-bound call", "graph replay")
HEAD = ("device", "gpu", "driver", "cuda", "torch", "triton", "numpy", "numba", "python", "commit", "date")


class Budget:
    """Seconds that are left of a whole, and of a part of it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.end = clock() + seconds

    def left(self) -> float:
        """Seconds left of the whole."""
        return self.end - self._clock()

    def part(self, seconds: float) -> Callable[[], float]:
        """What tells how much is left of a part that takes up to `seconds`, never more than is left of the whole."""
        end = min(self._clock() + seconds, self.end)
        return lambda: end - self._clock()


class Goal(NamedTuple):
    """What is to be reached, at most, and what was measured; None: it was not."""

    text: str
    most: float
    measured: float | None

    @property
    def verdict(self) -> str:
        """Reached, missed, or nothing."""
        if self.measured is None:
            return ""
        return "reached" if self.measured <= self.most else "missed"


def median(rows: Sequence[Row], what: str, clock: str, batch: int, max_accept: int = 1, top_k: int = 0) -> float | None:
    """Median in microseconds, of a run on a GPU; None if there is none."""
    wanted = {"device": "cuda", "what": what, "clock": clock, "batch": batch, "max_accept": max_accept, "top_k": top_k}
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            return float(row["p50_us"])
    return None


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """The goals; all ratios are of medians of one run, whose variants took turns."""

    def ratio(one: tuple[str, str, int], other: tuple[str, str, int]) -> float | None:
        above, below = median(rows, *one), median(rows, *other)
        return None if above is None or not below else above / below

    empty, floor = ("empty kernel", "device", 256), "empty kernel, memcpy"
    text = "kernel over an empty kernel, B=256, interval 1, logprobs"
    yield Goal(f"{text}, handles on the device", 3.0, ratio(("kernel", "device", 256), empty))
    yield Goal(f"{text}, handles from the host", 3.0, ratio(("kernel, handles on the host", "device", 256), empty))
    text = "launch to host-visible over an empty kernel and a memcpy of the same bytes, B=256"
    for what in ("step, mapped", "step, copy", "step by graph"):
        yield Goal(f"{text}, {what}", 1.5, ratio((what, "visible", 256), (floor, "visible", 256)))
    yield Goal(f"{text}, device's clock", 1.5, ratio(("kernel", "device", 256), (floor, "device", 256)))
    for what, clock in (("kernel", "device"), ("step, mapped", "visible")):
        yield Goal(f"B=4096 over B=64, {what}, {clock}", 2.0, ratio((what, clock, 4096), (what, clock, 64)))


def goals_table(rows: Sequence[Row]) -> str:
    """Goal, at most, measured, verdict."""
    lines = ["| goal | at most | measured | |", "| --- | ---: | ---: | --- |"]
    for goal in goals(rows):
        measured = NOT_MEASURED if goal.measured is None else f"{goal.measured:.2f}"
        lines.append(f"| {goal.text} | {goal.most:g} | {measured} | {goal.verdict} |")
    return "\n".join(lines)


def times_table(rows: Sequence[Row]) -> str:
    """Median microseconds, with the 20th and 80th percentile behind; a line a workload."""
    found = {(row["batch"], row["max_accept"], row["top_k"], row["what"], row["clock"]): row for row in _timed(rows)}
    workloads = {(row["max_accept"], row["top_k"], row["batch"]): row["bytes"] for row in _timed(rows)}
    titles = [title for _, _, title in COLUMNS]
    lines = ["| max_accept | top-k | B | bytes | " + " | ".join(titles) + " |"]
    lines.append("| ---: " * (4 + len(COLUMNS)) + "|")
    for (accept, top, batch), step_bytes in workloads.items():
        cells = [_cell(found.get((batch, accept, top, what, clock))) for what, clock, _ in COLUMNS]
        lines.append(f"| {accept} | {top} | {batch} | {step_bytes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def calls_table(rows: Sequence[Row]) -> str:
    """Host time of the ways to issue a launch."""
    first = {row["what"]: row for row in reversed(_timed(rows)) if row["what"] in CALLS}
    lines = ["| way to launch, host's time | us |", "| --- | ---: |"]
    return "\n".join(lines + [f"| {call} | {_cell(first.get(call))} |" for call in CALLS])


def checks_table(rows: Sequence[Row]) -> str:
    """What was checked, how many steps, and what was wrong."""
    lines = ["| part | check | steps | |", "| --- | --- | ---: | --- |"]
    for row in rows:
        if "check" in row:
            verdict = "passed" if row["passed"] else f"FAILED: {row['detail']}"
            lines.append(f"| {row['part']} | {row['check']} | {row.get('steps', '')} | {verdict} |")
    return "\n".join(lines)


def device_section(rows: Sequence[Row]) -> str:
    """What CUDA.md says of a run: machine, checks, goals, times; or that there was none."""
    rows = [row for row in rows if row.get("device") == "cuda"]
    if not rows:
        return "Not measured: no run of `make device-check` on a GPU has been recorded."
    about = ", ".join(f"{name} {rows[0].get(name)}" for name in HEAD)
    checks = [row for row in rows if "check" in row]
    passed = sum(row["passed"] for row in checks)
    tables = (goals_table(rows), times_table(rows), calls_table(rows))
    head = f"{about}. {passed} of {len(checks)} checks passed. Microseconds, medians (20th to 80th percentile)."
    return "\n\n".join((head, *tables))


def all_passed(rows: Sequence[Row]) -> bool:
    """Whether there were checks, and all passed."""
    checks = [row["passed"] for row in rows if "check" in row]
    return bool(checks) and all(checks)


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "what" in row]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['p50_us']:.1f} ({row['p20_us']:.1f}-{row['p80_us']:.1f})"
