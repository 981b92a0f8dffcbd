"""Write the figures of CUDA.md from the rows of kernel_counts and device_check: `python bench/cuda_table.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves the script's folder out
from device_report import device_section
from rows import RESULTS, ROOT, Row, read_rows, write_between

SHAPES = ((32, 1), (32, 4), (64, 2), (128, 4), (256, 8))


def main() -> None:
    """Rewrite the parts between the marks; without a run on a GPU the page says that there was none."""
    write_between(ROOT / "CUDA.md", "counts", table(read_rows(RESULTS / "kernel_counts.jsonl")))
    checked = RESULTS / "device_check.jsonl"
    write_between(ROOT / "CUDA.md", "device", device_section(read_rows(checked) if checked.exists() else []))


def table(rows: Sequence[Row]) -> str:
    """Instructions a row and sector traffic over the minimum, a line a workload, two columns a shape."""
    titles = [f"{block} rows, {warps} warp{'s' * (warps > 1)}" for block, warps in SHAPES]
    lines = ["| B | interval | logprobs | " + " | ".join(titles) + " |", "| ---: " * (3 + len(SHAPES)) + "|"]
    for batch, interval, logprobs in dict.fromkeys((r["batch"], r["interval"], r["logprobs"]) for r in rows):
        cells = [str(batch), str(interval), "on" if logprobs else "off"]
        for shape in SHAPES:
            (row,) = (
                r
                for r in rows
                if (r["batch"], r["interval"], r["logprobs"], r["block"], r["warps"])
                == (batch, interval, logprobs, *shape)
            )
            cells.append(f"{row['instructions']:.0f}, {row['traffic_ratio']:.2f}, {row['spins']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
