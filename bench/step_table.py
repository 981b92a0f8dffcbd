"""The table of a bench_step run, from its rows: medians, ratios, and how they stand to the targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rows import Row

# Ratio to reach by batch, at interval 1 without logprobs.
SCHEDULER_TARGETS = {1: 1, 256: 30, 1024: 100, 4096: 200}
VIEWS_TARGETS = {1024: 20}
DELTAS_TARGETS = {1024: 4}
BYTES_TARGET = 32
BYTES_TARGET_BATCH = 64  # below, the header of a frame is most of it

HEAD = (
    "B", "interval", "logprobs", "scheduler: loop + pickle", "gpupack", "ratio", "without socket: loop + pickle",
    "gpupack", "ratio", "receiver: pickle", "gpupack views", "ratio", "deltas", "ratio", "bytes/row: pickle", "gpupack",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """A Markdown table, one line a case, times in microseconds per step."""
    lines = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join(["---:"] * len(HEAD)) + " |"]
    lines += ["| " + " | ".join(_cells(case)) + " |" for case in _cases(rows)]
    note = "Medians in us per step. A ratio with a target in brackets was reached if it is followed by `ok`."
    return "\n".join([*lines, "", note])


def _cases(rows: Sequence[Row]) -> Iterator[dict[tuple[str, str], Row]]:
    keys = dict.fromkeys((row["batch"], row["interval"], row["logprobs"]) for row in rows)
    for key in keys:
        yield {
            (row["variant"], row["stage"]): row
            for row in rows
            if (row["batch"], row["interval"], row["logprobs"]) == key
        }


def _cells(case: dict[tuple[str, str], Row]) -> list[str]:
    any_row = next(iter(case.values()))
    batch = any_row["batch"]
    aimed = any_row["interval"] == 1 and not any_row["logprobs"]
    time = {key: row["p50_us"] for key, row in case.items()}
    loop, ours = time["loop", "scheduler"], time["gpupack", "scheduler"]
    loop_alone, ours_alone = time["loop", "no_socket"], time["gpupack", "no_socket"]
    pickle, views, deltas = time["loop", "decode"], time["gpupack", "views"], time["gpupack", "deltas"]
    per_row = case["gpupack", "scheduler"]["bytes_per_row"]
    size = f"{per_row:.1f}"
    if aimed and batch >= BYTES_TARGET_BATCH:
        size += f" (<= {BYTES_TARGET}{' ok' if per_row <= BYTES_TARGET else ''})"
    return [
        str(batch),
        str(any_row["interval"]),
        "on" if any_row["logprobs"] else "off",
        f"{loop:.1f}",
        f"{ours:.1f}",
        _ratio(loop, ours, SCHEDULER_TARGETS.get(batch) if aimed else None),
        f"{loop_alone:.1f}",
        f"{ours_alone:.1f}",
        _ratio(loop_alone, ours_alone, None),
        f"{pickle:.1f}",
        f"{views:.1f}",
        _ratio(pickle, views, VIEWS_TARGETS.get(batch) if aimed else None),
        f"{deltas:.1f}",
        _ratio(pickle, deltas, DELTAS_TARGETS.get(batch) if aimed else None),
        f"{case['loop', 'scheduler']['bytes_per_row']:.0f}",
        size,
    ]


def _ratio(baseline: float, ours: float, target: int | None) -> str:
    ratio = baseline / ours
    if target is None:
        return f"{ratio:.1f}"
    return f"{ratio:.1f} (>= {target}{' ok' if ratio >= target else ''})"
