"""Sender and receiver over real sockets in one process; `test_transport_processes.py` has more of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
from ends import WAIT_MS, Feed, send_until_lost, wait_for_peer

from gpupack.core.errors import BackpressureError, ClosedError, ConfigError, FrameTooLargeError, PeerLostError
from gpupack.transport.receiver import OutputReceiver
from gpupack.transport.sender import OutputSender

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    """An ipc endpoint of this test's own."""
    return f"ipc://{tmp_path}/output"


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


@pytest.mark.parametrize("cycle", [True, False])
def test_ends_that_are_collected_unclosed_do_not_hold_up_their_process(endpoint, cycle):
    """Their contexts end with them: not before their sockets, and without waiting for what is queued."""
    code = f"""if True:
        import gc, sys
        from ends import Feed
        from gpupack.transport.receiver import OutputReceiver
        from gpupack.transport.sender import OutputSender
        sender = OutputSender(sys.argv[1])
        sender.send(Feed().next())
        assert sender.frames_sent == 1
        receiver = OutputReceiver("tcp://127.0.0.1:*")
        if {cycle}:
            sender.cycle, receiver.cycle = sender, receiver
        contexts = sender._context, receiver._context
        del sender, receiver
        gc.collect()
        assert contexts[0].closed and contexts[1].closed
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-W", "error", "-c", code, endpoint], check=True, timeout=20, env=env)


def test_a_sender_that_is_never_closed_does_not_hold_up_the_end_of_its_process(endpoint):
    code = """if True:
        import sys
        from ends import Feed
        from gpupack.transport.sender import OutputSender
        sender = OutputSender(sys.argv[1])
        sender.send(Feed().next())
        assert sender.frames_sent == 1
        sender.cycle = sender
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code, endpoint], check=True, timeout=20, env=env)


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
