"""Write the results of README.md from the rows of a bench_step run: `python bench/readme_table.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves the script's folder out
from rows import RESULTS, ROOT, Row, read_rows, write_between

HEAD = (
    "requests", "interval", "logprobs", "loop + pickle + send", "gpupack: pack, frame, send", "ratio",
    "receiver: unpickle", "gpupack: verified views", "ratio", "deltas", "ratio", "bytes per row",
)  # fmt: skip
CHOSEN = [(batch, 1, False) for batch in (1, 64, 256, 1024, 4096)]
CHOSEN += [(1024, 1, True), (1024, 8, False), (1024, 50, False)]


def main() -> None:
    """Rewrite the part between the marks."""
    write_between(ROOT / "README.md", "results", results(read_rows(RESULTS / "bench_step.jsonl")))


def results(rows: Sequence[Row]) -> str:
    """Table, plot, and what they stand for."""
    about = rows[0]
    lines = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join(["---:"] * len(HEAD)) + " |"]
    lines += [_line(rows, *case) for case in CHOSEN]
    text = (
        "Microseconds per step, medians of one run (`make bench`): the CPU backend against a per-request loop with "
        "pickle (`bench/baselines.py`), tokens on the host already, one receiver process; "
        f"{about['cpu']}, {about['cores']} cores, {about['date'][:10]}, commit {about['commit']}, "
        f"Python {about['python']}, NumPy {about['numpy']}, Numba {about['numba']}, "
        f"load {about['load_1m']} at the start."
    )
    return "\n\n".join([text, "\n".join(lines), "![time per step against requests](bench/results/bench_step.svg)"])


def _line(rows: Sequence[Row], batch: int, interval: int, logprobs: bool) -> str:
    case = {
        (row["variant"], row["stage"]): row
        for row in rows
        if (row["batch"], row["interval"], row["logprobs"]) == (batch, interval, logprobs)
    }
    time = {key: row["p50_us"] for key, row in case.items()}
    loop, ours = time["loop", "scheduler"], time["gpupack", "scheduler"]
    unpickle, views, deltas = time["loop", "decode"], time["gpupack", "views"], time["gpupack", "deltas"]
    cells = [
        str(batch),
        str(interval),
        "on" if logprobs else "off",
        f"{loop:.0f}",
        f"{ours:.0f}",
        f"**{loop / ours:.1f}**",
        f"{unpickle:.0f}",
        f"{views:.0f}",
        f"{unpickle / views:.1f}",
        f"{deltas:.0f}",
        f"{unpickle / deltas:.1f}",
        f"{case['loop', 'scheduler']['bytes_per_row']:.0f} → {case['gpupack', 'scheduler']['bytes_per_row']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
