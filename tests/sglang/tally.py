"""What was compared in this run, for the summary at its end; and the comparison itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import columns as message_columns


@dataclass
class Tally:
    """Counts over all tests of the process."""

    steps: Counter[str] = field(default_factory=Counter)  # by setting
    messages: int = 0
    rows: int = 0
    texts: int = 0
    characters: int = 0
    paths: Counter[str] = field(default_factory=Counter)  # what happened in the lives
    compared: Counter[str] = field(default_factory=Counter)  # by column: messages
    told: Counter[str] = field(default_factory=Counter)  # by column: messages in which it says something
    mismatches: int = 0

    def compare(self, where: str, real: dict[str, Any], ours: dict[str, Any]) -> None:
        """Compare two messages column by column; AssertionError lists every row that differs."""
        self.messages += 1
        self.rows += len(real["rids"])
        wrong = []
        for name, value in real.items():
            self.compared[name] += 1
            self.told[name] += says_something(value)
            wrong += differences(name, value, ours[name])
        self.mismatches += len(wrong)
        lines = [
            f"  {place}: real {message_columns.readable(a)!r}, ours {message_columns.readable(b)!r}"
            for place, a, b in wrong
        ]
        assert not wrong, "\n".join([f"{where}: {len(wrong)} mismatches", *lines])


def says_something(value: Any) -> bool:
    """Whether a column has a row with a value that is not none, empty, zero or false."""
    rows = value.values() if isinstance(value, dict) else value or []
    return any(row not in (None, [], 0, "", {}) for row in rows)


def differences(name: str, real: Any, ours: Any) -> list[tuple[str, Any, Any]]:
    """Rows of a column that differ: place, real value, our value."""
    if isinstance(real, dict) and isinstance(ours, dict) and real.keys() == ours.keys():
        return [found for key in real for found in differences(f"{name}[{key!r}]", real[key], ours[key])]
    if not (isinstance(real, list) and isinstance(ours, list) and len(real) == len(ours)):
        return [] if real == ours else [(name, real, ours)]
    return [(f"row {i}, {name}", a, b) for i, (a, b) in enumerate(zip(real, ours, strict=True)) if a != b]


TALLY = Tally()


def summary(version: str) -> list[str]:
    """The lines at the end of a run."""
    if not TALLY.messages:
        return []
    by_setting = ", ".join(f"{name} {count}" for name, count in sorted(TALLY.steps.items()))
    left_out = ", ".join(message_columns.left_out_here())
    return [
        f"sglang {version}, {message_columns.WIRE} wire: {sum(TALLY.steps.values())} steps compared ({by_setting}), "
        f"{TALLY.messages} messages, {TALLY.rows} rows, {TALLY.texts} texts of {TALLY.characters} characters",
        f"columns compared: {len(TALLY.compared)} ({', '.join(TALLY.compared)})",
        f"columns left out: {left_out}",
        f"mismatches: {TALLY.mismatches}",
    ]
