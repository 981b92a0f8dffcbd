"""One side of a peer, in a process of its own: does what the harness says, one JSON line at a time.

Each side's answers hold raw samples; medians are the harness's matter. Between two steps the scheduler waits,
outside of its clock, until the receiver has taken the message: an engine runs its model there, and zmq's thread
and the caches are as cold as that makes them.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import socket
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from select import select
from time import monotonic_ns, thread_time_ns
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves the script's folder out
import zmq
from allocations import Allocations
from workload import Life, Sent, Step, Workload

TIMEOUT_S = 60
NS = 1_000_000_000


def resident_bytes() -> int:
    """Memory of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


class Worker:
    """Answers commands with its methods of that name, until the harness goes away."""

    def __init__(self, peer: Any, control: socket.socket, acks: socket.socket) -> None:
        self.peer, self.control, self.acks = peer, control, acks
        self.path: Any = None
        self.allocations = Allocations()

    def serve(self) -> None:
        """Answer until the harness is gone."""
        lines = self.control.makefile("rw")
        while line := self.next_line(lines):
            command = json.loads(line)
            answer = getattr(self, command.pop("do"))(**command)
            lines.write(json.dumps(answer) + "\n")
            lines.flush()

    def next_line(self, lines: TextIO) -> str:
        """The next command; empty once the harness is gone."""
        return lines.readline()

    def about(self) -> dict[str, Any]:
        """Who this is."""
        name = self.peer.VERSION_OF
        packages = {package: version(package) for package in ("numpy", "msgspec", "pyzmq")}
        return {"peer": f"{name} {version(name)}", "python": platform.python_version(), **packages}

    def stages(self) -> list[str]:
        """Names of what a sample holds, the CPU time aside."""
        return list(self.path.stages)

    def memory(self) -> dict[str, int]:
        """Bytes of this process, garbage collected first."""
        gc.collect()
        return {"resident": resident_bytes()}

    def end(self) -> None:
        """Drop the path."""
        self.path.close()
        self.path = None


class SchedulerWorker(Worker):
    """The scheduler's side."""

    def begin(self, work: dict[str, Any], endpoint: str, step_bytes: float) -> None:
        """Make the path; nothing is sent yet."""
        self.work = Workload(**work)
        self.life = Life(self.work)
        self.path = self.peer.SchedulerPath(self.work, endpoint, step_bytes)

    def steps(self, count: int) -> dict[str, float]:
        """Run steps that do not count; bytes of the last that sent something."""
        size = 0
        for _ in range(count):
            sent = self._step(self.life.step())[0]
            size = sent.size or size
        return {"step_bytes": size}

    def round(self, seconds: float, most: int) -> dict[str, Any]:
        """Samples of as many steps as fit: means over `interval` steps of each stage, then of the thread's CPU time."""
        samples, positions = [], []
        rows = size = steps = 0
        deadline = time.monotonic() + seconds
        while len(samples) < most and (not samples or time.monotonic() < deadline):
            sums = [0] * (len(self.path.stages) + 1)
            for _ in range(self.work.interval):
                step = self.life.step()
                sent, cpu_ns = self._step(step)
                sums = [a + b for a, b in zip(sums, (*sent.stages_ns, cpu_ns), strict=True)]
                rows, size, steps = rows + sent.rows, size + sent.size, steps + 1
            samples.append([value / self.work.interval for value in sums])
            positions.append([step.position, sent.size])
        return {"samples": samples, "positions": positions, "rows": rows, "bytes": size, "steps": steps}

    def paced(self, steps: int) -> dict[str, Any]:
        """Run steps at the workload's rate, or as fast as that goes; when each began, and how long all took."""
        period = NS // self.work.rate
        starts, taken = [], 0
        first = due = monotonic_ns()
        for _ in range(steps):
            step = self.life.step()
            self.path.prepare(step)
            due += period
            if select([self.acks], [], [], 0)[0]:  # left there, they would fill the pipe and stop the receiver
                taken += len(self.acks.recv(steps))
            if due > monotonic_ns():
                time.sleep(max(due - monotonic_ns(), 0) / NS)
            starts.append(monotonic_ns())
            self.path.run(step)
        took = monotonic_ns() - first
        while taken < steps:
            taken += len(self.acks.recv(steps))
        return {"starts": starts, "took_ns": took}

    def count(self, steps: int) -> dict[str, float]:
        """Blocks that Python allocates in a step."""
        blocks = 0
        for _ in range(steps):
            step = self.life.step()
            self.path.prepare(step)
            before = self.allocations.blocks
            with self.allocations:
                sent = self.path.run(step)
            blocks += self.allocations.blocks - before
            self._wait(sent)
        return {"blocks": blocks / steps}

    def memory(self) -> dict[str, int]:
        """Bytes of this process and of the state that the output path keeps."""
        return super().memory() | {"state": self.path.state_bytes() if self.path is not None else 0}

    def _step(self, step: Step) -> tuple[Sent, int]:
        self.path.prepare(step)
        cpu = thread_time_ns()
        sent = self.path.run(step)
        cpu = thread_time_ns() - cpu
        self._wait(sent)
        return sent, cpu

    def _wait(self, sent: Sent) -> None:
        if sent.size and not self.acks.recv(1):
            raise RuntimeError("receiver: it has ended")


class ReceiverWorker(Worker):
    """The receiver's side: takes messages as they come, also while the harness is silent."""

    def begin(self, work: dict[str, Any], endpoint: str) -> None:
        """Bind."""
        self.path = self.peer.ReceiverPath(Workload(**work), endpoint)
        self.poller = zmq.Poller()
        self.poller.register(self.path.socket, zmq.POLLIN)
        self.poller.register(self.control, zmq.POLLIN)
        self.watching = self.counting = False
        self.contents: dict[str, list[Any]] = {}
        self.samples: list[list[int]] = []
        self.ends: list[int] = []
        self.blocks = 0

    def next_line(self, lines: TextIO) -> str:
        """The same; takes what comes until then."""
        while self.path is not None and self.path.socket in dict(self.poller.poll()):
            self._take()
        return super().next_line(lines)

    def watch(self, on: bool) -> str:
        """Keep what comes, by request; what was kept so far, as a digest."""
        self.watching = on
        lines = [json.dumps([rid, *content]) for rid, content in sorted(self.contents.items())]
        return f"{len(lines)} requests {hashlib.sha256(''.join(lines).encode()).hexdigest()}"

    def report(self, messages: int = 0) -> dict[str, Any]:
        """Samples since the last report, once there are as many: stages, then CPU time; when the deltas were there."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.samples) < messages and time.monotonic() < deadline:
            if self.path.socket.poll(100):
                self._take()
        samples, ends, self.samples, self.ends = self.samples, self.ends, [], []
        return {"samples": samples, "ends": ends}

    def count(self, on: bool) -> dict[str, float]:
        """Count the blocks that Python allocates; by message since the last report."""
        self.counting = on
        blocks, self.blocks = self.blocks, 0
        return {"blocks": blocks / max(len(self.samples), 1)}

    def _take(self) -> None:
        """Take one message."""
        before, cpu = self.allocations.blocks, thread_time_ns()
        if self.counting:
            with self.allocations:
                stages = self.path.receive()
        else:
            stages = self.path.receive()
        self.ends.append(monotonic_ns())
        self.blocks += self.allocations.blocks - before
        if self.watching:
            self._keep()
        self.path.forget()
        self.samples.append([*stages, thread_time_ns() - cpu])
        self.acks.send(b"1")

    def _keep(self) -> None:
        for rid, *parts, reason in self.path.content():
            kept = self.contents.setdefault(rid, [[], [], [], [], ""])
            for items, part in zip(kept, parts, strict=False):
                items += part
            kept[-1] = reason


def main() -> None:
    """Serve one side of a peer."""
    parser = argparse.ArgumentParser(description="one side of a peer; started by the harness")
    parser.add_argument("side", choices=("scheduler", "receiver"))
    parser.add_argument("module")
    parser.add_argument("control", type=int)
    parser.add_argument("acks", type=int)
    options = parser.parse_args()
    control, acks = socket.socket(fileno=options.control), socket.socket(fileno=options.acks)
    acks.settimeout(TIMEOUT_S)
    kind = SchedulerWorker if options.side == "scheduler" else ReceiverWorker
    kind(import_module(options.module), control, acks).serve()


if __name__ == "__main__":
    main()
