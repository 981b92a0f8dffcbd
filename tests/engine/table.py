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
_lost_ports: list[str] = []


def add(name: str, requests: int, stats: dict[str, Any], differ: int, seconds: float) -> None:
    """Add a configuration's line; `differ`: answers that are not the same over HTTP; `seconds` of all its runs."""
    engine = sum(stats["fallbacks"].values())
    ways = (stats["frames"], stats["messages"], stats["steps"] - stats["frames"] - stats["messages"], engine)
    numbers = (requests, *ways, stats["verified"], stats["differences"], differ, round(seconds))
    _rows.append((name, *map(str, numbers)))


def lost_port(run: str) -> None:
    """Add a run that was made again, since another program had taken its server's port."""
    _lost_ports.append(f"made again, another program had taken the server's port: {run}")


def lines() -> list[str]:
    """The table, in Markdown, and runs made again."""
    if not _rows:
        return _lost_ports
    widths = [max(map(len, column)) for column in zip(HEAD, *_rows, strict=True)]
    rows = [HEAD, tuple("-" * width for width in widths), *_rows]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ] + _lost_ports
