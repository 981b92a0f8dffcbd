"""Finds rows of a run by what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rows import Row
from workload import Workload


class Rows:
    """The rows of one run, by question, workload, variant and stage."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.all = rows

    def of(self, question: str, **wanted: object) -> list[Row]:
        """Rows of a question with these values, in their order."""
        return [
            row for row in self.all
            if row["question"] == question and all(row.get(name) == value for name, value in wanted.items())
        ]  # fmt: skip

    def one(self, question: str, work: Workload, variant: str, stage: str, **wanted: object) -> Row | None:
        """The row of one stage, or None if it was not measured."""
        found = self.of(question, **asdict(work), variant=variant, stage=stage, **wanted)
        return found[0] if found else None

    def value(
        self, question: str, work: Workload, variant: str, stage: str, name: str = "p50_us", **wanted: object
    ) -> float | None:
        """One figure of it."""
        row = self.one(question, work, variant, stage, **wanted)
        return None if row is None else float(row[name])

    def ratio(
        self, question: str, work: Workload, theirs: tuple[str, str], ours: tuple[str, str], name: str = "p50_us"
    ) -> float | None:
        """What `theirs` (variant, stage) takes over what `ours` takes; None if one of them was not measured."""
        above, below = self.value(question, work, *theirs, name), self.value(question, work, *ours, name)
        return None if above is None or not below else above / below
