"""A sender and receiving processes that are killed, stopped and slow."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ends import WAIT_MS, WAIT_S, Feed, send_until_lost

from gpupack.core.errors import PeerLostError
from gpupack.transport.sender import OutputSender

CHILD = Path(__file__).parents[1] / "receiver_child.py"

pytestmark = pytest.mark.timeout(60)


class Child:
    """A `receiver_child.py`, ended with the test whatever happens."""

    def __init__(self, endpoint: str, requests: int, delay_ms: float = 0) -> None:
        command = [sys.executable, str(CHILD), "--endpoint", endpoint, "--requests", str(requests)]
        self.process = subprocess.Popen([*command, "--delay-ms", str(delay_ms)], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._text = b""
        self.endpoint: str = self.until("endpoint")["endpoint"]

    def until(self, key: str) -> dict[str, Any]:
        """The next event with this key."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + WAIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self._text:
                    line, self._text = self._text.split(b"\n", 1)
                    if key in (event := json.loads(line)):
                        return event
                left = deadline - time.monotonic()
                assert left > 0, f"the child did not say {key!r} within {WAIT_S} s"
                if selector.select(left):
                    data = self.process.stdout.read()
                    assert data != b"", f"the child ended with status {self.process.wait()} before {key!r}"
                    self._text += data or b""

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill it if it still runs, and wait for its end."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Children of a test, ended after it."""
    started: list[Child] = []
    yield started
    for child in started:
        child.close()
        assert child.process.returncode is not None


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    """An ipc endpoint of this test's own."""
    return f"ipc://{tmp_path}/output"


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_killed_receiver_is_noticed_and_a_new_one_takes_over(children, endpoint, kind):
    first = Child(endpoint if kind == "ipc" else "tcp://127.0.0.1:*", requests=4)
    children.append(first)
    feed = Feed()
    with OutputSender(first.endpoint) as sender:
        for _ in range(20):
            sender.send(feed.next())
        first.until("frames")
        stream = sender.stream_id
        first.signal(signal.SIGKILL)
        error = send_until_lost(sender, feed, within_s=1.0)
        assert first.endpoint in str(error)
        assert f"frames 0 to {sender.next_frame_no - 1} of stream {stream:#x}" in str(error)
        for call in (sender.check_peer, sender.flush, lambda: sender.send(feed.next())):
            with pytest.raises(PeerLostError, match="reopen"):
                call()
        second = Child(endpoint if kind == "ipc" else "tcp://127.0.0.1:*", requests=4)
        children.append(second)
        sender.reopen(second.endpoint)
        assert sender.stream_id != stream
        assert (sender.next_frame_no, sender.pending_bytes) == (0, 0)
        before = feed.steps
        sender.send(feed.next(resumed=True))
        sender.send(feed.next(final=True))
        report = second.until("tokens")
    assert report["errors"] == []
    assert report["tokens"] == {rid: [before, before + 1] for rid in feed.rids}


def test_a_stopped_receiver_costs_bounded_memory_and_loses_nothing(children, endpoint):
    steps, rows = 5000, 16
    child = Child(endpoint, requests=rows)
    children.append(child)
    feed = Feed(rows)
    sent = 0
    with OutputSender(endpoint, high_water_mark=8, max_pending_bytes=2 << 20) as sender:
        sender.send(feed.next())
        child.until("frames")
        child.signal(signal.SIGSTOP)
        most = 0
        for _ in range(steps):
            frame = feed.next()
            sent += len(frame)
            sender.send(frame)
            most = max(most, sender.pending_bytes)
        assert 0 < most < sent / 4
        assert sender.blocked_ns == 0
        assert sender.frames_sent < steps / 2
        child.signal(signal.SIGCONT)
        sender.send(feed.next(final=True))
        assert sender.flush(WAIT_MS)
        report = child.until("tokens")
        assert sender.frames_sent + sender.frames_merged == feed.steps
    assert report["errors"] == []
    assert report["frames"] == sender.frames_sent
    assert report["tokens"] == {rid: list(range(steps + 2)) for rid in feed.rids}


def test_a_slow_receiver_gets_everything_in_fewer_frames(children, endpoint):
    child = Child(endpoint, requests=4, delay_ms=3)
    children.append(child)
    feed = Feed(pad="x" * 2000)
    with OutputSender(endpoint, high_water_mark=1) as sender:
        for _ in range(3000):
            sender.send(feed.next())
        sender.send(feed.next(final=True))
        assert sender.flush(WAIT_MS)
        report = child.until("tokens")
        assert sender.frames_merged > 0
    assert report["errors"] == []
    assert report["tokens"] == {rid: list(range(3001)) for rid in feed.rids}
