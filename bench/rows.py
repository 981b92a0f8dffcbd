"""Benchmark rows: what is kept of a run, as JSON lines that plots and tables are drawn from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("numpy", "numba", "pyzmq", "msgspec")

Row = dict[str, Any]


def environment() -> Row:
    """Date, commit, machine and versions; the same in every row of a run."""
    changed = "+changes" if _git("status", "--porcelain", "gpupack") else ""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + changed,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),  # before the run: on a busy machine its figures are worth little
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def quantiles(samples_ns: Sequence[float]) -> Row:
    """Percentiles of samples in nanoseconds, as microseconds."""
    values = np.quantile(samples_ns, (0.2, 0.5, 0.8, 0.99)) / 1000
    named = zip(("p20_us", "p50_us", "p80_us", "p99_us"), values.tolist(), strict=True)
    return {name: round(value, 2) for name, value in named} | {"samples": len(samples_ns)}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows of one run, in place of those of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_between(page: Path, name: str, text: str) -> None:
    """Put `text` between the marks `<!-- name: begin -->` and `<!-- name: end -->` of a Markdown page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = page.read_text("utf-8").split(begin)
    _, tail = rest.split(end)
    page.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}", "utf-8")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
