"""What of bench/device_check.py needs no device: budget, goals, report, and what it imports."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.append(str(BENCH))

import device_check  # noqa: E402
from device_report import Budget, all_passed, calls_table, checks_table, device_section, goals, times_table  # noqa: E402


def timed(what: str, clock: str, p50: float, batch: int = 256, device: str = "cuda", **more: Any) -> dict[str, Any]:
    row = {"device": device, "part": "times", "batch": batch, "max_accept": 1, "top_k": 0, "bytes": 160}
    return row | {"what": what, "clock": clock, "p20_us": p50 - 1, "p50_us": p50, "p80_us": p50 + 1} | more


def test_a_part_has_its_seconds_but_never_more_than_the_whole() -> None:
    now = [100.0]
    budget = Budget(60, clock=lambda: now[0])
    first = budget.part(40)
    assert first() == 40
    now[0] = 130.0
    assert (first(), budget.left()) == (10, 30)
    assert budget.part(40)() == 30
    now[0] = 170.0
    assert budget.left() < 0
    assert budget.part(40)() < 0


def test_goals_are_ratios_of_medians() -> None:
    rows = [
        timed("empty kernel", "device", 2.0),
        timed("kernel", "device", 5.0),
        timed("kernel", "device", 99.0, top_k=5),
        timed("kernel", "device", 4.0, batch=64),
        timed("kernel", "device", 9.0, batch=4096),
        timed("empty kernel, memcpy", "visible", 20.0),
        timed("step, mapped", "visible", 30.0),
    ]
    found = {goal.text: goal for goal in goals(rows)}
    kernel = found["kernel over an empty kernel, B=256, interval 1, logprobs, handles on the device"]
    assert (kernel.measured, kernel.most, kernel.verdict) == (2.5, 3.0, "reached")
    large = found["B=4096 over B=64, kernel, device"]
    assert (large.measured, large.verdict) == (2.25, "missed")
    (visible,) = (goal for text, goal in found.items() if text.endswith("B=256, step, mapped"))
    assert (visible.measured, visible.verdict) == (1.5, "reached")
    assert [goal.verdict for goal in found.values() if goal.measured is None] == [""] * 5


def test_nothing_counts_as_measured_that_was_not_measured_on_a_gpu() -> None:
    rows = [timed(what, "device", 1.0, device="interpret") for what in ("empty kernel", "kernel")]
    assert all(goal.measured is None for goal in goals(rows))
    assert device_section(rows).startswith("Not measured")
    assert device_section([]).startswith("Not measured")


def test_the_section_for_the_page_has_machine_checks_goals_and_times() -> None:
    check = {"device": "cuda", "gpu": "Some GPU", "part": "lives", "check": "one", "passed": True, "detail": ""}
    section = device_section([check, timed("kernel", "device", 5.0), timed("JIT call", "launch", 7.0)])
    assert "gpu Some GPU" in section
    assert "1 of 1 checks passed" in section
    assert "| 1 | 0 | 256 | 160 |  | 5.0 (4.0-6.0) |" in section
    assert "| JIT call | 7.0 (6.0-8.0) |" in section


def test_a_part_that_fails_is_said_and_its_rows_stay(capsys: pytest.CaptureFixture[str]) -> None:
    def part() -> Iterator[dict[str, Any]]:
        yield {"check": "one", "passed": True, "detail": ""}
        raise RuntimeError("no\ndevice")

    rows: list[dict[str, Any]] = []
    device_check.run_part("soak", part(), {"device": "cuda"}, rows)
    assert [(row["part"], row["check"], row["passed"]) for row in rows] == [
        ("soak", "one", True),
        ("soak", "soak: ran to its end", False),
    ]
    assert not all_passed(rows)
    assert "FAILED: RuntimeError: no device" in checks_table(rows)
    assert "FAILED soak" in capsys.readouterr().out


def test_no_checks_are_no_success() -> None:
    assert not all_passed([])
    assert not all_passed([timed("kernel", "device", 1.0)])
    assert times_table([]).count("\n") == 1
    assert calls_table([]).count("\n") == 4


ALONE = """
import sys
sys.path += [{site!r}, {bench!r}]

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("zmq", "msgspec"):
            raise ImportError(f"{{name}} is not there")

sys.meta_path.insert(0, Refused())
import device_check
place = device_check.Place(cuda=False)
device_check.parts(place, device_check.SMALL)
import gpupack, gpupack.kernels
print(gpupack.__file__, gpupack.kernels.__file__)
"""

WRONG = (
    ALONE
    + """
import device_lives, device_soak
from gpupack.core import layout as L
from gpupack.backends.cuda.host_runtime import InterpreterRuntime
right = InterpreterRuntime.launch

def wrong(self, kernel, programs, arguments, *others):
    ring, out = int(arguments[3][L.SCAN_RING]), arguments[2]
    right(self, kernel, programs, arguments, *others)
    out.view(others[0]["RING"], -1)[ring, {word}] ^= 1

InterpreterRuntime.launch = wrong
rows = [*device_soak.run(place, 2, lambda: 60), *device_lives.run(place, 20, 1, lambda: 60)]
assert len(rows) == 9 and not any(row["passed"] for row in rows), rows
print(rows[0]["detail"], "and", rows[4]["detail"])
"""
)


def alone(text: str, **names: Any) -> str:
    """Run in a process without installed packages' path files: so gpupack counts as not installed."""
    text = text.format(site=sysconfig.get_path("purelib"), bench=str(BENCH), **names)
    done = subprocess.run([sys.executable, "-S", "-c", text], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_from_the_tree_with_neither_zmq_nor_msgspec() -> None:
    root = BENCH.parent
    assert alone(ALONE).split() == [str(root / "gpupack" / "__init__.py"), str(root / "kernels" / "__init__.py")]


def test_a_wrong_word_in_a_step_fails_the_checks() -> None:
    said = alone(WRONG, word="L.HEADER_WORDS")  # of the first row's batch index
    assert "column 0: expected" in said or "batch_index: expected" in said
