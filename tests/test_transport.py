"""Sender and receiver over real sockets, and real processes that are killed, stopped and slow."""

from __future__ import annotations

import contextlib
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

import numpy as np
import pytest
import zmq
from frames import Row, Step, frame_of

from gpupack import layout as L
from gpupack.errors import BackpressureError, ClosedError, ConfigError, FrameTooLargeError, PeerLostError
from gpupack.receiver import OutputReceiver
from gpupack.sender import OutputSender
from gpupack.side import OpeningRecord, SideRecord
from gpupack.wire import encode_frame

CHILD = Path(__file__).with_name("receiver_child.py")
WAIT_S = 20.0
WAIT_MS = 10_000

pytestmark = pytest.mark.timeout(60)


class Feed:
    """Frames of `rows` requests that get one token a step: token `step` at step `step`."""

    def __init__(self, rows: int = 4, name: str = "r", pad: str = "") -> None:
        self.rids = [f"{name}{i}" for i in range(rows)]
        self.steps = 0
        self.pad = pad
        self._columns = frame_of(Step([Row(i, 1) for i in range(rows)]))._replace(
            token_indptr=np.arange(rows + 1, dtype=np.int32)
        )

    def next(self, *, final: bool = False, resumed: bool = False) -> bytearray:
        """The frame of the next step; the first one opens, a resumed one opens again."""
        opens = self.steps == 0 or resumed
        flags = L.ROW_OPENING * opens | (L.ROW_FINAL | L.FINISH_LENGTH << L.ROW_CODE_SHIFT) * final
        openings = [
            OpeningRecord(row=i, rid=rid, decoded_text=self.pad, tokens_before=self.steps, resumed=resumed)
            for i, rid in enumerate(self.rids)
        ]
        rows = len(self.rids)
        frame = self._columns._replace(
            step=self.steps,
            flags=np.full(rows, flags, np.int32),
            visible_len=np.full(rows, self.steps + 1, np.int32),
            match=np.full(rows, self.steps + 1, np.int32) if final else None,
            token_ids=np.full(rows, self.steps, np.int32),
            side=SideRecord(openings=openings) if opens else None,
        )
        self.steps += 1
        return encode_frame(frame)


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


def wait_for_peer(sender: OutputSender) -> None:
    """Wait until the handshake is done."""
    deadline = time.monotonic() + WAIT_S
    while not sender._peer.connected:
        sender.check_peer()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def send_until_lost(sender: OutputSender, feed: Feed, within_s: float) -> PeerLostError:
    """Send on as a scheduler would; the error, which must come in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            sender.send(feed.next())
        except PeerLostError as error:
            return error
        time.sleep(0.005)
    raise AssertionError(f"no PeerLostError within {within_s} s")


# --- Processes ------------------------------------------------------------------------------------


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


# --- One process ----------------------------------------------------------------------------------


def collect(receiver: OutputReceiver, frames: int) -> dict[str, list[int]]:
    """Tokens by rid of the next frames."""
    tokens: dict[str, list[int]] = {}
    for _ in range(frames):
        step = receiver.recv(WAIT_MS)
        assert step is not None
        for delta in step.deltas():
            tokens.setdefault(delta.rid, []).extend(delta.token_ids)
    return tokens


def test_two_senders_into_one_receiver(endpoint):
    with OutputReceiver(endpoint) as receiver, OutputSender(endpoint) as one, OutputSender(endpoint) as two:
        feeds = [Feed(2, "a"), Feed(3, "b")]
        for step in range(10):
            for sender, feed, rank in ((one, feeds[0], 0), (two, feeds[1], 1)):
                frame = feed.next(final=step == 9)
                frame[24:28] = rank.to_bytes(4, "little")
                sender.send(frame)
        tokens = collect(receiver, 20)
        assert tokens == {rid: list(range(10)) for feed in feeds for rid in feed.rids}
        assert receiver.lost(0) == receiver.lost(1) == []


def test_a_receiver_that_comes_later_gets_all_frames(endpoint):
    feed = Feed()
    with OutputSender(endpoint, high_water_mark=2) as sender:
        for _ in range(50):
            sender.send(feed.next())
        assert sender.pending_bytes > 0
        with OutputReceiver(endpoint) as receiver:
            first = collect(receiver, 1)
            assert sender.flush(WAIT_MS)
            rest = collect(receiver, sender.frames_sent - 1)
        assert {rid: first[rid] + rest[rid] for rid in feed.rids} == {rid: list(range(50)) for rid in feed.rids}


def test_a_receiver_that_restarts(endpoint):
    feed = Feed()
    with OutputSender(endpoint) as sender:
        with OutputReceiver(endpoint) as receiver:
            sender.send(feed.next())
            collect(receiver, 1)
        error = send_until_lost(sender, feed, within_s=1.0)
        assert endpoint in str(error)
        with OutputReceiver(endpoint) as receiver:
            before = feed.steps
            sender.reopen()
            sender.send(feed.next(resumed=True))
            step = receiver.recv(WAIT_MS)
            assert step is not None
            assert step.frame.frame_no == 0
            assert [delta.opening.tokens_before for delta in step.deltas()] == [before] * 4
            # This receiver never saw the tokens before: it says so.
            assert sorted(step.lost) == receiver.lost() == feed.rids


def try_send(sender: OutputSender, feed: Feed) -> None:
    """Send one frame, full or not."""
    with contextlib.suppress(BackpressureError):
        sender.send(feed.next())


def test_backpressure_keeps_everything_and_sends_it_once(endpoint):
    feed = Feed()
    with OutputSender(endpoint, high_water_mark=1, max_pending_bytes=2000, send_timeout_ms=40) as sender:
        while sender.blocked_ns == 0:  # merged frames grow by little
            try_send(sender, feed)
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(BackpressureError, match=f"{endpoint}.*all are kept"):
                sender.send(feed.next())
            assert 0.03 < time.monotonic() - start < 2.0
        assert sender.blocked_ns > 3 * 30e6
        assert sender.pending_bytes > 2000
        with OutputReceiver(endpoint) as receiver:
            tokens = collect(receiver, 1)
            assert sender.flush(WAIT_MS)
            for rid, more in collect(receiver, sender.frames_sent - 1).items():
                tokens[rid] += more
            assert receiver.recv(50) is None
        assert tokens == {rid: list(range(feed.steps)) for rid in feed.rids}


def test_a_blocked_send_goes_on_when_there_is_room(endpoint):
    feed = Feed()
    with OutputSender(endpoint, high_water_mark=1, max_pending_bytes=0, send_timeout_ms=WAIT_MS) as sender:
        sender.send(feed.next())
        with OutputReceiver(endpoint) as receiver:
            for _ in range(20):
                sender.send(feed.next())  # each waits, at most, until zmq has handed over the one before
            assert sender.pending_bytes == 0
            assert collect(receiver, 21) == {rid: list(range(21)) for rid in feed.rids}


def test_a_message_over_the_receivers_limit_ends_the_connection(endpoint):
    large, small = Feed(4, "large", pad="x" * 2000), Feed(4, "small")
    with (
        OutputReceiver(endpoint, max_frame_bytes=4096) as receiver,
        OutputSender(endpoint) as bad,
        OutputSender(endpoint) as good,
    ):
        wait_for_peer(bad)
        bad.send(large.next())
        assert receiver.recv(500) is None
        with pytest.raises(PeerLostError, match="frames 0 to 0"):
            bad.check_peer()
        good.send(small.next())
        assert set(collect(receiver, 1)) == set(small.rids)


def test_the_sender_refuses_a_frame_over_its_own_limit(endpoint):
    with OutputSender(endpoint, max_frame_bytes=1024) as sender:
        with pytest.raises(FrameTooLargeError, match="1024"):
            sender.send(Feed(pad="x" * 2000).next())
        assert (sender.next_frame_no, sender.pending_bytes) == (0, 0)
        sender.close(0)


def test_closed_means_closed(endpoint, tmp_path):
    feed = Feed()
    receiver = OutputReceiver(endpoint)
    sender = OutputSender(endpoint)
    assert (tmp_path / "output").exists()
    sender.send(feed.next())
    sender.close()
    sender.close()
    assert set(collect(receiver, 1)) == set(feed.rids)
    receiver.close()
    receiver.close()
    assert not (tmp_path / "output").exists()
    for call in (lambda: sender.send(feed.next()), sender.check_peer, sender.flush, sender.reopen):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        receiver.recv(0)


def test_a_closing_receiver_leaves_the_file_of_its_successor(endpoint, tmp_path):
    old = OutputReceiver(endpoint)
    with OutputReceiver(endpoint):
        old.close()
        assert (tmp_path / "output").exists()


def test_close_sends_what_waits(endpoint):
    feed = Feed()
    sender = OutputSender(endpoint, high_water_mark=1)
    for _ in range(30):
        sender.send(feed.next())
    with OutputReceiver(endpoint) as receiver:
        wait_for_peer(sender)
        sender.close(WAIT_MS)
        assert collect(receiver, sender.frames_sent) == {rid: list(range(30)) for rid in feed.rids}


def test_close_does_not_wait_for_a_receiver_that_never_came(endpoint):
    sender = OutputSender(endpoint, high_water_mark=1)
    feed = Feed()
    for _ in range(3):
        sender.send(feed.next())
    start = time.monotonic()
    sender.close(100)
    assert time.monotonic() - start < 2.0


def test_a_shared_context_is_left_alone(endpoint):
    with zmq.Context() as context:
        feed = Feed()
        with OutputReceiver(endpoint, context=context) as receiver, OutputSender(endpoint, context=context) as sender:
            sender.send(feed.next())
            assert set(collect(receiver, 1)) == set(feed.rids)
        assert not context.closed


def test_columns_outlive_the_step_and_the_receiver(endpoint):
    feed = Feed(300)
    with OutputReceiver(endpoint) as receiver, OutputSender(endpoint) as sender:
        sender.send(feed.next())
        step = receiver.recv(WAIT_MS)
        assert step is not None
        slot = step.frame.slot
        del step
        for _ in range(30):
            sender.send(feed.next())
            receiver.recv(WAIT_MS)
    assert slot.tolist() == list(range(300))


@pytest.mark.parametrize(
    "options",
    [{"send_timeout_ms": -1}, {"max_pending_bytes": -1}, {"high_water_mark": 0}, {"max_frame_bytes": 63}],
)
def test_options_out_of_range(endpoint, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        OutputSender(endpoint, **options)


def test_an_endpoint_that_cannot_be_bound(endpoint):
    with OutputReceiver("tcp://127.0.0.1:*") as receiver, pytest.raises(zmq.ZMQError):
        OutputReceiver(receiver.endpoint)
    with pytest.raises(zmq.ZMQError):
        OutputSender("nonsense")


def test_importing_gpupack_does_not_load_zmq():
    code = "import sys, gpupack; assert 'zmq' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
