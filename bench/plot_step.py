"""Draw time per step against the batch, from the rows of bench_step; nothing is measured here.

python bench/plot_step.py [--json FILE] [--svg FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# With PYTHONSAFEPATH=1, which keeps kernels/ from shadowing another package, this folder is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from rows import RESULTS, Row, read_rows

PANELS = {
    "scheduler: pack, frame, send": (("loop", "scheduler", "loop + pickle"), ("gpupack", "scheduler", "gpupack")),
    "receiver, from the bytes": (
        ("loop", "decode", "pickle"),
        ("gpupack", "deltas", "gpupack, deltas"),
        ("gpupack", "views", "gpupack, column views"),
    ),
}
COLORS = {"loop": "#b5482a", "gpupack": "#1f5f8b"}
MARKERS = {"scheduler": "o", "decode": "o", "deltas": "s", "views": "o"}
STYLES = {1: "-", 8: "--", 50: ":"}


def draw_panel(axes: Axes, title: str, curves: tuple[tuple[str, str, str], ...], rows: list[Row]) -> None:
    """One panel: a line for each curve and interval, with its 20th to 80th percentile as a band."""
    for variant, stage, label in curves:
        for interval, style in STYLES.items():
            chosen = [r for r in rows if (r["variant"], r["stage"], r["interval"]) == (variant, stage, interval)]
            if not chosen:
                continue
            chosen.sort(key=lambda row: row["batch"])
            batches = [row["batch"] for row in chosen]
            text = label if interval == 1 else f"{label}, interval {interval}"
            axes.plot(
                batches, [row["p50_us"] for row in chosen], style, color=COLORS[variant], marker=MARKERS[stage],
                markersize=4, linewidth=1.4, label=text,
            )  # fmt: skip
            low, high = ([row[name] for row in chosen] for name in ("p20_us", "p80_us"))
            axes.fill_between(batches, low, high, color=COLORS[variant], alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.set_xticks(sorted({row["batch"] for row in rows}), [str(b) for b in sorted({row["batch"] for row in rows})])


def draw(rows: list[Row], path: Path) -> None:
    """Four panels: scheduler and receiver, without and with logprobs."""
    plt.rcParams["svg.hashsalt"] = "gpupack"  # the same rows give the same bytes
    figure, grid = plt.subplots(2, 2, figsize=(11, 8), sharex=True, sharey=True, layout="constrained")
    for line, logprobs in zip(grid, (False, True), strict=True):
        chosen = [row for row in rows if row["logprobs"] == logprobs]
        for axes, (title, curves) in zip(line, PANELS.items(), strict=True):
            draw_panel(axes, f"{title}; logprobs {'on' if logprobs else 'off'}", curves, chosen)
    for axes in grid[-1]:
        axes.set_xlabel("requests in the batch")
    for axes in grid[:, 0]:
        axes.set_ylabel("us per step (median)")
    for axes in grid[0]:
        axes.legend(fontsize=7)
    first = rows[0]
    figure.suptitle(f"Output of a decode step, {first['cpu']}, {first['cores']} cores, {first['commit']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Read the rows, draw."""
    parser = argparse.ArgumentParser(description="plot of bench_step's rows")
    parser.add_argument("--json", type=Path, default=RESULTS / "bench_step.jsonl")
    parser.add_argument("--svg", type=Path, default=RESULTS / "bench_step.svg")
    options = parser.parse_args()
    draw(read_rows(options.json), options.svg)


if __name__ == "__main__":
    main()
