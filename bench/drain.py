"""A receiving process that takes messages off a socket and drops them, and its handle in the benchmark.

Both variants send into the same one, so that what is timed is a send to a peer that keeps up: it
acknowledges each message, and the benchmark waits for that, untimed, before the next step. In an
engine a model runs between two steps; the socket is empty again by then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from types import TracebackType

import zmq

TIMEOUT_MS = 10_000
POLL_MS = 500


class Drain:
    """The receiving process: send to `endpoint`, then `wait()`; a context manager that leaves none behind."""

    def __init__(self, context: zmq.Context) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gpupack-bench-")
        self.endpoint = f"ipc://{self._folder.name}/output"
        acks = f"ipc://{self._folder.name}/acks"
        self._acks = context.socket(zmq.PULL)
        self._acks.bind(acks)
        self._process = subprocess.Popen([sys.executable, __file__, "--endpoint", self.endpoint, "--acks", acks])
        try:
            self.wait()  # it is bound
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Wait until one more message has been taken; TimeoutError if the process is gone."""
        if not self._acks.poll(TIMEOUT_MS):
            raise TimeoutError(f"the receiving process took nothing for {TIMEOUT_MS} ms")
        self._acks.recv()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._acks.close(0)
        self._folder.cleanup()

    def __enter__(self) -> Drain:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def main() -> None:
    """Take messages until the parent process is gone."""
    parser = argparse.ArgumentParser(description="receiving process of the benchmark")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--acks", required=True)
    options = parser.parse_args()
    parent = os.getppid()
    context = zmq.Context()
    pull, acks = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(options.endpoint)
    acks.connect(options.acks)
    acks.send(b"")
    while os.getppid() == parent:
        if pull.poll(POLL_MS):
            pull.recv(copy=False)
            acks.send(b"")
    context.destroy(0)


if __name__ == "__main__":
    main()
