"""Write the results of README.md from the rows of a bench_step run: `python bench/report.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves the script's folder out
from goals import goals_table
from lookup import Rows
from questions import BATCHES, ENGINE
from rows import RESULTS, ROOT, Row, read_rows, write_between
from workload import Workload

PEERS = (ENGINE, "sglang 0.5.23 msgpack", "sglang 0.5.16", "structs", "floor", "gpupack")
HEAD = ("", *PEERS, "ratio", "receiver: " + ENGINE, "gpupack: verified columns", "deltas", "bytes per token")
LINES: tuple[tuple[str, str, Workload], ...] = (
    *((f"B={batch}", "batch", Workload(batch)) for batch in BATCHES),
    *((f"B=1024, interval {n}", "interval", Workload(1024, interval=n)) for n in (8, 50)),
    *((f"B=1024, logprobs {k}", "logprobs", Workload(1024, logprobs=k)) for k in ("sampled", "top-5", "top-20")),
    ("B=1024, all host-judged", "host-judged", Workload(1024, host_judged=1.0)),
    ("B=1024, 4 tokens accepted", "accept", Workload(1024, accept=4)),
    ("B=1024, 1% end in each step", "finishing", Workload(1024, finishing=0.01)),
)
WHERE_NOTHING = (
    "Where little is sent, nothing is saved: with one request both sides take the time of a zmq send and of waking "
    "a process, and the receiver's checks cost more than unpickling one row. The first step of a request costs more "
    "than the original's (its opening record), which the line with 1% of the requests ending, and newcomers in their "
    "places, shows, and the plot `bench/results/wave.svg` for all at once."
)

BLOCKS = (
    "CPU is that of the thread that does the work; blocks are what Python's object allocator hands out; the hop "
    "is from the tokens on the host to the deltas in the receiving process."
)


def main() -> None:
    """Rewrite the part between the marks."""
    write_between(ROOT / "README.md", "results", results(read_rows(RESULTS / "bench_step.jsonl")))


def results(rows: Sequence[Row]) -> str:
    """The main table, two plots, the goals, and what they stand for."""
    about = rows[0]
    text = (
        "Microseconds per step on the scheduler's side, then per message at the receiver; medians of one run of "
        "`make bench`, all variants in turns, each in two processes of its own environment, contents compared "
        "first. The real SGLang's streamer over real requests with its own sockets; `structs` is a msgspec struct a "
        "request in the shape that vLLM uses, `floor` a copy and a send of as many bytes as gpupack's frame; gpupack "
        "is the CPU backend. Tokens are on the host for all. `bench/harness.py` says what the clocks include. "
        f"{about['cpu']}, {about['cores']} cores, {about['date'][:10]}, commit {about['commit']}, "
        f"Python {about['python']}, NumPy {about['numpy']}, pyzmq {about['pyzmq']}, msgspec {about['msgspec']}, "
        f"load {about['load_1m']} at the start."
    )
    plots = "\n".join(f"![{name}](bench/results/{name}.svg)" for name in ("batch", "logprobs"))
    more = "All plots are drawn from the same rows by `bench/plot.py`: `bench/results/*.svg`."
    found = Rows(rows)
    return "\n\n".join(
        [text, main_table(found), WHERE_NOTHING, cost_table(found), BLOCKS, plots, more, goals_table(rows)]
    )


def main_table(rows: Rows) -> str:
    """A line a workload."""
    lines = ["| " + " | ".join(HEAD) + " |", "| --- |" + " ---: |" * (len(HEAD) - 1)]
    lines += ["| " + " | ".join(_cells(rows, *line)) + " |" for line in LINES if rows.of(line[1])]
    return "\n".join(lines)


def cost_table(rows: Rows) -> str:
    """What the variants cost beside time, a line each."""
    head = (
        "B=1024", "scheduler: CPU us", "blocks a step", "receiver: CPU us", "blocks a message",
        "hop at B=256, 1,000 steps/s: reached", "median us", "99th percentile",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for peer in PEERS:
        cells = [peer]
        for side in ("scheduler", "receiver"):
            for name in ("p50_us", f"{side}_blocks"):
                cells.append(_number(rows.value("batch", Workload(1024), peer, f"{side} cpu", name)))
        for name in ("steps_per_second", "p50_us", "p99_us"):
            cells.append(_number(rows.value("hop", Workload(256, rate=1000), peer, "hop", name)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(rows: Rows, label: str, question: str, work: Workload) -> Iterator[str]:
    yield label
    for peer in PEERS:
        yield _number(rows.value(question, work, peer, "scheduler"))
    ratio = rows.ratio(question, work, (ENGINE, "scheduler"), ("gpupack", "scheduler"))
    yield "" if ratio is None else f"**{ratio:.1f}**"
    for peer, stage in ((ENGINE, "deltas"), ("gpupack", "views"), ("gpupack", "deltas")):
        yield _number(rows.value(question, work, peer, stage))
    sizes = [rows.value(question, work, peer, "scheduler", "bytes_per_token") for peer in (ENGINE, "gpupack")]
    yield " → ".join(_number(size) for size in sizes)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


if __name__ == "__main__":
    main()
