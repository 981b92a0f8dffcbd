"""The peers: what is compared, each in an environment of its own: a process for the scheduler, one for the receiver."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rows import ROOT
from workload import Workload

WORKER = Path(__file__).resolve().parent / "worker.py"
TIMEOUT_S = 180  # for the slowest answer: SGLang is imported in some 15 s
MODELS = {"GPUPACK_SGLANG_MODELS": str(ROOT / ".sglang-models")}


@dataclass(frozen=True)
class Peer:
    """A variant: its module here, its environment, and what its processes are told."""

    module: str
    python: Path = Path(sys.executable)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def there(self) -> bool:
        """Whether its environment has been made."""
        return self.python.exists()


def _sglang(version: str, **variables: str) -> Peer:
    return Peer("path_sglang", ROOT / f".venv-sglang-{version}" / "bin" / "python", MODELS | variables)


PEERS = {
    "gpupack": Peer("path_gpupack"),
    "sglang 0.5.23": _sglang("0.5.23"),
    "sglang 0.5.23 msgpack": _sglang("0.5.23", SGLANG_USE_PICKLE_IPC="0"),
    "sglang 0.5.16": _sglang("0.5.16"),
    "structs": Peer("path_structs"),
    "floor": Peer("path_floor"),
}


class Side:
    """One process of a peer; its commands are methods of `worker.py`."""

    def __init__(self, name: str, peer: Peer, side: str, acks: socket.socket) -> None:
        self.name = f"{name}, {side}"
        self._control, theirs = socket.socketpair()
        self._control.settimeout(TIMEOUT_S)
        numbers = [theirs.fileno(), acks.fileno()]
        self._process = subprocess.Popen(
            [str(peer.python), str(WORKER), side, peer.module, *map(str, numbers)],
            env={**os.environ, **peer.variables},
            pass_fds=numbers,
            stdout=sys.stderr,
        )
        theirs.close()
        self._lines = self._control.makefile("rw")

    def start(self, command: str, **arguments: Any) -> None:
        """Give a command."""
        self._lines.write(json.dumps({"do": command, **arguments}) + "\n")
        self._lines.flush()

    def answer(self) -> Any:
        """The answer to the command that was given; RuntimeError if the process has ended."""
        line = self._lines.readline()
        if not line:
            raise RuntimeError(f"{self.name}: expected an answer, the process ended; its error is above")
        return json.loads(line)

    def call(self, command: str, **arguments: Any) -> Any:
        """Give a command, wait for its answer."""
        self.start(command, **arguments)
        return self.answer()

    def close(self) -> None:
        """End the process, which leaves when its harness does."""
        self._lines.close()
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair:
    """Both processes of a peer."""

    def __init__(self, name: str) -> None:
        self.name = name
        acks = socket.socketpair()
        self.scheduler, self.receiver = (
            Side(name, PEERS[name], side, end) for side, end in zip(("scheduler", "receiver"), acks, strict=True)
        )
        for end in acks:
            end.close()
        self._folder = tempfile.TemporaryDirectory(prefix="gpupack-bench-")
        self.about: dict[str, Any] = {}

    def ask(self) -> None:
        """Start to ask who the processes are, once they have imported what they need."""
        self.scheduler.start("about")
        self.receiver.start("about")

    def hear(self) -> None:
        """Take the answers."""
        self.about = self.scheduler.answer()
        if self.receiver.answer() != self.about:
            raise AssertionError(f"{self.name}: expected one environment for both processes, got {self.about}")

    def begin(self, work: Workload, step_bytes: float) -> None:
        """Begin a workload; `step_bytes` is what a step of gpupack's takes on the wire."""
        endpoint = f"ipc://{self._folder.name}/output"
        self.receiver.call("begin", work=asdict(work), endpoint=endpoint)
        self.scheduler.call("begin", work=asdict(work), endpoint=endpoint, step_bytes=step_bytes)

    def end(self) -> None:
        """End the workload."""
        self.scheduler.call("end")
        self.receiver.call("end")

    def close(self) -> None:
        """End the processes."""
        self.scheduler.close()
        self.receiver.close()
        self._folder.cleanup()
