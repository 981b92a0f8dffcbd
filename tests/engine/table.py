"""The table that a run of the engine tests prints."""

from __future__ import annotations

from typing import Any

HEAD = (
    "configuration",
    "requests",
    "frames",
    "messages",
    "nothing due",
    "by engine",
    "payloads compared",
    "payloads that differ",
    "answers that differ",
    "seconds",
)
_rows: list[tuple[str, ...]] = []


def add(name: str, requests: int, stats: dict[str, Any], differ: int, seconds: float) -> None:
    """Add a configuration's line; `differ`: answers that are not the same over HTTP; `seconds` of all its runs."""
    engine = sum(stats["fallbacks"].values())
    ways = (stats["frames"], stats["messages"], stats["steps"] - stats["frames"] - stats["messages"], engine)
    numbers = (requests, *ways, stats["verified"], stats["differences"], differ, round(seconds))
    _rows.append((name, *map(str, numbers)))


def lines() -> list[str]:
    """The table, in Markdown."""
    if not _rows:
        return []
    widths = [max(map(len, column)) for column in zip(HEAD, *_rows, strict=True)]
    rows = [HEAD, tuple("-" * width for width in widths), *_rows]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
