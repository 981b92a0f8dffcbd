"""What the benchmark asks: workloads as data, by question, with the peers that take part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workload import LOGPROBS, Workload

ENGINE = "sglang 0.5.23"  # the goals compare with its default wire
ALL = ("gpupack", ENGINE, "sglang 0.5.23 msgpack", "sglang 0.5.16", "structs", "floor")
WIRES = ("gpupack", ENGINE, "sglang 0.5.23 msgpack", "structs")
BOTH = ("gpupack", ENGINE)
BATCHES = (1, 8, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Case:
    """One workload and who is measured under it."""

    question: str
    work: Workload
    peers: tuple[str, ...] = BOTH


def cases() -> Iterator[Case]:
    """All cases; the first batch of processes is fresh for the question about memory."""
    yield Case("memory", Workload(4096), BOTH)
    for batch in BATCHES:
        yield Case("batch", Workload(batch), ALL)
    for interval in (8, 50):
        for batch in (1, 8, 64, 256, 1024):
            yield Case("interval", Workload(batch, interval=interval), ("gpupack", ENGINE, "sglang 0.5.16"))
    for logprobs in list(LOGPROBS)[1:]:
        for batch in (256, 1024, 4096):
            yield Case("logprobs", Workload(batch, logprobs=logprobs), WIRES)
    for batch in (64, 256, 1024, 4096):
        yield Case("host-judged", Workload(batch, host_judged=1.0))
    yield Case("host-judged", Workload(1024, host_judged=0.1))
    for batch in (64, 1024):
        yield Case("accept", Workload(batch, accept=4), ("gpupack", ENGINE, "sglang 0.5.16", "structs"))
    for batch in (256, 1024):
        yield Case("finishing", Workload(batch, finishing=0.01))
    yield Case("hop", Workload(256, rate=1000), ("gpupack", ENGINE, "sglang 0.5.23 msgpack", "structs", "floor"))
    yield Case("life", Workload(64, output_len=16_000))
    for batch in (64, 256, 1024, 4096):
        yield Case("wave", Workload(batch, output_len=8))


def quick_cases() -> Iterator[Case]:
    """One or two cases of each question, small."""
    seen: dict[str, int] = {}
    for case in cases():
        seen[case.question] = seen.get(case.question, 0) + 1
        if seen[case.question] <= 2 and case.work.batch <= 256 and case.question not in ("life", "memory"):
            yield case
