"""Write the layout tables of CUDA.md from `gpupack/core/layout.py`: run it after changing the layout."""

from __future__ import annotations

import sys
from pathlib import Path

from gpupack.core import layout as L

PAGE = Path(__file__).resolve().parent.parent / "CUDA.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

TABLES = (
    ("State, int32 `[capacity, 16]`, 64 bytes a slot", L.STATE_FIELDS, L.WORD),
    ("Speculative counters, int32; histograms of correct drafts and cap lens follow", L.SPEC_FIELDS, L.WORD),
    ("Control, int32 `[5, batch]`", L.CONTROL_FIELDS, 0),
    ("Launch words, in front of the control rows", L.LAUNCH_FIELDS, L.WORD),
    ("Addresses of the inputs, 64 bits each, behind the launch words", L.LAUNCH_INPUTS, 2 * L.WORD),
    ("Scan words, int64 `[6, blocks]`, behind the launch number", L.SCAN_AXES, 0),
    ("Packed step: header, 64 bytes", L.HEADER_FIELDS, L.WORD),
    ("Packed step: row columns, int32", L.ROW_FIELDS, 0),
    ("Finish codes", L.FINISH_CODES, 0),
)


def table(title: str, fields: dict[str, str], width: int) -> str:
    """One Markdown table: place (or byte offset, where the width is given), name, meaning."""
    place = "byte" if width else "index"
    lines = [f"**{title}**", "", f"| {place} | field | meaning |", "| --- | --- | --- |"]
    lines += [f"| {i * (width or 1)} | {name} | {doc or '″'} |" for i, (name, doc) in enumerate(fields.items())]
    return "\n".join(lines)


def all_tables() -> str:
    """All tables, as they stand between the marks in CUDA.md."""
    return "\n\n".join(table(*entry) for entry in TABLES)


def page_with_tables(page: str) -> str:
    """The page with fresh tables between its marks."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{all_tables()}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE} written\n")
