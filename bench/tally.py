"""Tally: the samples of one peer under one workload, and the rows that they become."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rows import Row, quantiles
from workload import Workload

BUCKET = 1000  # tokens of a life for which one row is made
NS = 1_000_000_000


class Tally:
    """Collects rounds; a sample of the scheduler is a mean over `interval` steps, one of the receiver a message."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.scheduler: list[list[float]] = []
        self.positions: list[list[int]] = []
        self.receiver: list[list[float]] = []
        self.sent_rows = self.bytes = self.steps = 0

    def add(self, sent: dict[str, Any], got: dict[str, Any]) -> None:
        """One round, as both workers answered."""
        self.scheduler += sent["samples"]
        self.positions += sent["positions"]
        self.receiver += got["samples"]
        self.sent_rows += sent["rows"]
        self.bytes += sent["bytes"]
        self.steps += sent["steps"]

    def rows(self, scheduler_stages: list[str], receiver_stages: list[str]) -> Iterator[Row]:
        """Rows of all stages; of a workload whose requests end together, by where they stand."""
        if self.work.output_len:
            yield from self._by_position()
            return
        sizes = {
            "rows_per_step": round(self.sent_rows / self.steps, 2),
            "bytes_per_step": round(self.bytes / self.steps, 1),
            "bytes_per_token": round(self.bytes / (self.steps * self.work.batch * self.work.accept), 2),
        }
        for stages, side, samples in (
            (scheduler_stages, "scheduler", self.scheduler),
            (receiver_stages, "receiver", self.receiver),
        ):
            columns = list(zip(*samples, strict=True)) or [[]] * (len(stages) + 1)
            for stage, column in zip([*stages, f"{side} cpu"], columns, strict=True):
                if column:
                    yield {"stage": stage, **quantiles(column), **sizes}
        yield {"stage": "scheduler", **quantiles([sum(sample[:-1]) for sample in self.scheduler]), **sizes}

    def _by_position(self) -> Iterator[Row]:
        """One row for each thousand tokens of a life; of a wave, one for its first, last and other steps."""
        length = self.work.output_len
        name: Callable[[int], Any] = lambda position: -(-position // BUCKET) * BUCKET  # noqa: E731
        if length < BUCKET:
            name = {1: "first", length: "last"}.get
        found: dict[Any, list[tuple[float, int, float]]] = {}
        for sample, (position, size), got in zip(self.scheduler, self.positions, self.receiver, strict=True):
            found.setdefault(name(position) or "other", []).append((sum(sample[:-1]), size, got[-2]))
        for position, samples in found.items():
            times, sizes, received = zip(*samples, strict=True)
            size = {"bytes_per_step": round(sum(sizes) / len(sizes), 1), "position": position}
            yield {"stage": "scheduler", **quantiles(times), **size}
            yield {"stage": "deltas", **quantiles(received), **size}


def hop_row(hops_ns: list[float], took_ns: int) -> Row:
    """The row of paced steps, with the rate that was reached."""
    return {"stage": "hop", **quantiles(hops_ns), "steps_per_second": round(len(hops_ns) / took_ns * NS, 1)}
