"""Draw the plots from the rows of bench_step, one for each question; nothing is measured here.

python bench/plot.py [--json FILE] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# With PYTHONSAFEPATH=1, which keeps kernels/ from shadowing another package, this folder is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from lookup import Rows
from matplotlib.axes import Axes
from rows import RESULTS, Row, read_rows
from workload import LOGPROBS

COLORS = {
    "gpupack": "#1f5f8b", "sglang 0.5.23": "#b5482a", "sglang 0.5.23 msgpack": "#d98c3f", "sglang 0.5.16": "#8a6d3b",
    "structs": "#5b8a3a", "floor": "#888888",
}  # fmt: skip
MB = 1 << 20


def curve(axes: Axes, rows: list[Row], across: str, label: str, style: str = "-", value: str = "p50_us") -> None:
    """A line over `across`, medians with their 20th to 80th percentile as a band."""
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row[across])
    places, color = [row[across] for row in rows], COLORS[rows[0]["variant"]]
    axes.plot(places, [row[value] for row in rows], style, color=color, marker="o", ms=3, lw=1.4, label=label)
    if value == "p50_us":
        low, high = ([row[name] for row in rows] for name in ("p20_us", "p80_us"))
        axes.fill_between(places, low, high, color=color, alpha=0.12, linewidth=0)


def log_axes(axes: Axes, across: str, up: str) -> None:
    """Both axes logarithmic; the names of what they show."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({int(x) for line in axes.lines for x in line.get_xdata()})  # type: ignore[union-attr]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(across)
    axes.set_ylabel(up)


def draw_batch(rows: Rows, axes: Axes) -> None:
    """Time per step against B."""
    for variant in COLORS:
        curve(axes, rows.of("batch", variant=variant, stage="scheduler"), "batch", variant)
    log_axes(axes, "requests in the batch", "scheduler, us per step")


def draw_receiver(rows: Rows, axes: Axes) -> None:
    """Receiver time against B."""
    for variant in COLORS:
        curve(axes, rows.of("batch", variant=variant, stage="deltas"), "batch", f"{variant}, deltas")
    curve(axes, rows.of("batch", variant="gpupack", stage="views"), "batch", "gpupack, verified columns", ":")
    log_axes(axes, "requests in the batch", "receiver, us per message")


def draw_bytes(rows: Rows, axes: Axes) -> None:
    """Bytes per output token against B."""
    for variant in COLORS:
        found = rows.of("batch", variant=variant, stage="scheduler")
        curve(axes, found, "batch", variant, value="bytes_per_token")
    log_axes(axes, "requests in the batch", "bytes per output token")


def draw_interval(rows: Rows, axes: Axes) -> None:
    """Time per step against the interval, a line for each B."""
    for batch, style in ((8, ":"), (64, "--"), (1024, "-")):
        for variant in COLORS:
            found = rows.of("interval", variant=variant, stage="scheduler", batch=batch)
            if found:
                found += rows.of("batch", variant=variant, stage="scheduler", batch=batch)
            curve(axes, found, "interval", f"{variant}, B={batch}", style)
    log_axes(axes, "stream interval", "scheduler, us per step")


def draw_logprobs(rows: Rows, axes: Axes) -> None:
    """Time per step with logprobs, a line for each B."""
    for batch, style in ((256, ":"), (1024, "--"), (4096, "-")):
        for variant in COLORS:
            found = rows.of("logprobs", variant=variant, stage="scheduler", batch=batch)
            if found:
                found += rows.of("batch", variant=variant, stage="scheduler", batch=batch)
            placed = [{**row, "place": list(LOGPROBS).index(row["logprobs"])} for row in found]
            curve(axes, placed, "place", f"{variant}, B={batch}", style)
    axes.set_yscale("log")
    axes.set_xticks(range(len(LOGPROBS)), list(LOGPROBS))
    axes.set_ylabel("scheduler, us per step")


def draw_hop(rows: Rows, axes: Axes) -> None:
    """From tokens on the host to deltas at the receiver: median and 99th percentile, with the rate that was reached."""
    found = rows.of("hop", stage="hop")
    for place, row in enumerate(found):
        color = COLORS[row["variant"]]
        axes.bar(place - 0.2, row["p50_us"], 0.4, color=color)
        axes.bar(place + 0.2, row["p99_us"], 0.4, color=color, alpha=0.5)
    names = [
        f"{row['variant'].replace(' msgpack', chr(10) + 'msgpack')}\n{row['steps_per_second']:.0f}/s" for row in found
    ]
    axes.set_xticks(range(len(found)), names, fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("us, median and 99th percentile")


def draw_life(rows: Rows, axes: Axes) -> None:
    """Time and bytes per step over a life."""
    for variant in COLORS:
        for stage, style in (("scheduler", "-"), ("deltas", ":")):
            curve(axes, rows.of("life", variant=variant, stage=stage), "position", f"{variant}, {stage}", style)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of each request so far")
    axes.set_ylabel("us per step")


def draw_wave(rows: Rows, axes: Axes) -> None:
    """The first, the last and the other steps of requests that begin and end together."""
    for position, style in (("first", "--"), ("last", "-"), ("other", ":")):
        for variant in COLORS:
            found = rows.of("wave", variant=variant, stage="scheduler", position=position)
            curve(axes, found, "batch", f"{variant}, {position}", style)
    log_axes(axes, "requests that begin and end in one step", "scheduler, us per step")


def draw_memory(rows: Rows, axes: Axes) -> None:
    """What the processes take idle, and what 4,096 requests add."""
    found = rows.of("memory")
    for place, row in enumerate(found):
        color = COLORS[row["variant"]]
        axes.bar(place, row["idle"] / MB, color=color, alpha=0.4)
        axes.bar(place, row["grown"] / MB, bottom=row["idle"] / MB, color=color)
        axes.text(place, (row["idle"] + row["grown"]) / MB, f"+{row['grown'] / MB:.0f}", ha="center", va="bottom")
    names = [f"{row['variant']}\n{row['stage'].removesuffix(' memory')}" for row in found]
    state = [f"\nstate {row['state'] / MB:.1f}" if "state" in row else "" for row in found]
    axes.set_xticks(range(len(found)), [a + b for a, b in zip(names, state, strict=True)], fontsize=7)
    axes.set_ylabel("MiB resident: idle, with 4,096 requests")


PLOTS: dict[str, tuple[str, Callable[[Rows, Axes], None]]] = {
    "batch": ("Time per step against the batch", draw_batch),
    "receiver": ("Receiver time against the batch", draw_receiver),
    "bytes": ("Bytes per output token", draw_bytes),
    "interval": ("Time per step against the interval", draw_interval),
    "logprobs": ("Time per step with logprobs", draw_logprobs),
    "hop": ("Tokens on the host to deltas at the receiver, 1,000 steps/s, B=256", draw_hop),
    "life": ("A life of 16,000 tokens, B=64", draw_life),
    "wave": ("A wave: all requests begin, and end, in one step", draw_wave),
    "memory": ("Memory of the processes", draw_memory),
}


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """One SVG for each question that was measured."""
    options: dict[str, Any] = {"svg.hashsalt": "gpupack"}  # the same rows give the same bytes
    plt.rcParams.update(options)
    found, first, written = Rows(rows), rows[0], []
    for name, (title, fill) in PLOTS.items():
        if not found.of("batch" if name in ("receiver", "bytes") else name):
            continue
        figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
        fill(found, axes)
        axes.grid(True, which="major", alpha=0.3)
        axes.set_title(f"{title}\n{first['cpu']}, {first['cores']} cores, {first['commit']}", fontsize=9)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
        written.append(folder / f"{name}.svg")
        figure.savefig(written[-1], metadata={"Date": None})
        plt.close(figure)
    return written


def main() -> None:
    """Read the rows, draw."""
    parser = argparse.ArgumentParser(description="plots of bench_step's rows")
    parser.add_argument("--json", type=Path, default=RESULTS / "bench_step.jsonl")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    for path in draw(read_rows(options.json), options.folder):
        print(path)


if __name__ == "__main__":
    main()
