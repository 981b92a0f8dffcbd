"""`OutputStreamer.stream_output`: the shape of the original, ranks, time-stats logging, the crash for tests."""

from __future__ import annotations

import time

import numpy as np
import pytest
from output_line import TIMEOUT_MS, lines, scores

from gpupack.core.config import PackerConfig, crash_after_stream_outputs
from gpupack.core.errors import ConfigError, CrashRequestedError, InputError, PeerLostError
from gpupack.core.request import Request
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.streamer.output_streamer import OutputStreamer
from gpupack.transport.message_columns import OutputColumns
from gpupack.transport.receiver import OutputReceiver
from gpupack.transport.sender import OutputSender

line = lines  # a fixture
CRASH = "SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS"
NO_HANDLES = np.empty(0, np.int64)


def append(line, handles, *tokens) -> None:
    line.streamer.send(line.packer.append(np.asarray(handles), np.array(tokens)))


def test_it_packs_and_sends_what_append_took_in(line):
    line = line()
    handles = line.streamer.admit([Request(name, return_logprob=True) for name in "ab"])
    line.streamer.send(line.packer.append(handles, np.array([5, 6]), logprobs=scores([-1], [-2])))
    report = line.streamer.stream_output(handles, return_logprob=False)
    columns = OutputColumns.of(line.receive())
    assert (report.rows, columns.output_ids, columns.output_token_logprobs_val) == (2, [[5], [6]], None)
    line.streamer.send(line.packer.append(handles, np.array([7, 8]), logprobs=scores([-3], [-4])))
    line.streamer.stream_output(handles, True)
    columns = OutputColumns.of(line.receive())
    assert columns.output_token_logprobs_val == [[-1.0, -3.0], [-2.0, -4.0]]
    assert columns.output_token_logprobs_idx == [[5, 7], [6, 8]]


def test_the_request_to_skip_keeps_its_cursors(line):
    line = line()
    a, b = line.streamer.admit([Request("a"), Request("b")]).tolist()
    append(line, [a, b], 5, 6)
    control = Control(2).reset(2)
    control.finish(1)
    asked = control.words.copy()
    line.streamer.stream_output(np.array([a, b]), False, skip_handle=a, control=control)
    columns = OutputColumns.of(line.receive())
    assert (columns.rids, columns.finished_reasons[0]["type"]) == (["b"], "abort")
    assert np.array_equal(control.words, asked)
    append(line, [a], 7)
    line.streamer.stream_output(np.array([a]), False, skip_handle=b)
    assert OutputColumns.of(line.receive()).output_ids == [[5, 7]]


def test_an_idle_batch_sends_no_rows_and_no_ranks(line):
    line = line()
    assert line.streamer.stream_output(NO_HANDLES, False).frame_bytes == 0
    line.streamer.stream_output(NO_HANDLES, True, is_idle_batch=True)
    columns = OutputColumns.of(line.receive())
    assert (columns.rids, columns.dp_ranks, columns.output_token_logprobs_val) == ([], None, [])


def test_nothing_is_lost_behind_a_step_in_flight(line):
    line = line()
    handles = line.streamer.admit([Request("r")])
    ticket = line.packer.step(handles, np.array([5]))
    with pytest.raises(InputError, match="stream_output: expected no step in flight, 1 are"):
        line.streamer.stream_output(handles, False)
    line.streamer.send(ticket)
    assert OutputColumns.of(line.receive()).output_ids == [[5]]


def test_a_lost_receiver_is_told_before_anything_is_packed(line, tmp_path):
    line = line()
    handles = line.streamer.admit([Request("r")])
    append(line, handles, 5)
    line.streamer.stream_output(handles, False)
    line.receive()
    append(line, handles, 6)
    line.receiver.close()
    with pytest.raises(PeerLostError):
        wait_for_the_loss(line.sender)
    with pytest.raises(PeerLostError):
        line.streamer.stream_output(handles, False)
    assert line.packer.in_flight == ()
    with OutputReceiver(f"ipc://{tmp_path}/other") as receiver:
        line.streamer.reopen(receiver.endpoint)
        line.streamer.stream_output(handles, False)
        assert OutputColumns.of(receiver.recv(TIMEOUT_MS)).output_ids == [[6]]


def wait_for_the_loss(sender: OutputSender) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        sender.check_peer()
        time.sleep(0.01)


def test_a_rank_without_the_socket_does_nothing():
    packer = Packer(PackerConfig(vocab_size=10, capacity=2))
    streamer = OutputStreamer(packer, None)
    handles = streamer.admit([Request("r"), Request("s")])
    streamer.attach(int(handles[0]), time_stats=b"x")
    streamer.set_counts(handles, image_tokens=np.array([1, 2]))
    assert streamer.stream_output(handles, True).rows == 0
    assert streamer.metrics.snapshot()["steps"] == 0
    with pytest.raises(InputError, match="sender: expected one to send steps, got None"):
        streamer.send(packer.step(handles, np.array([1, 2])))
    streamer.retire(handles)
    streamer.close()


@pytest.mark.parametrize(("rank", "expected"), [(0, [["a"], ["b"]]), (1, [[], []])])
def test_time_stats_are_logged_on_the_step_of_the_final_row(line, rank, expected):
    logged: list[str] = []
    line = line(streamer={"log_time_stats": lambda request: logged.append(request.rid), "attn_tp_rank": rank})
    handles = line.streamer.admit([Request("a", max_new_tokens=2), Request("b", max_new_tokens=3)])
    seen = []
    for token in range(4):
        line.streamer.send(line.packer.step(handles, np.array([token, token])))
        seen.append(logged.copy())
        logged.clear()
    assert seen == [[], *expected, []]


def test_the_crash_for_tests_comes_after_sending_on_the_nth_call_and_later(line, monkeypatch):
    monkeypatch.setenv(CRASH, "2")
    line = line()
    handles = line.streamer.admit([Request("r")])
    line.streamer.stream_output(NO_HANDLES, False, is_idle_batch=True)
    assert line.receive().frame.idle
    append(line, handles, 5)
    line.streamer.stream_output(handles, False)
    assert line.receive().frame.rows == 1
    for token in (6, 7):
        append(line, handles, token)
        with pytest.raises(CrashRequestedError, match=r"test crash: expected 2 calls at most, got call [23]"):
            line.streamer.stream_output(handles, False)
        assert OutputColumns.of(line.receive()).output_ids == [[token]]


def test_the_crash_variable(monkeypatch):
    for text, expected in (("0", 0), ("7", 7), ("-3", 0)):
        monkeypatch.setenv(CRASH, text)
        assert crash_after_stream_outputs() == expected
    monkeypatch.setenv(CRASH, "many")
    with pytest.raises(ConfigError, match=f"{CRASH}: expected an integer, got 'many'"):
        crash_after_stream_outputs()
    monkeypatch.delenv(CRASH)
    assert crash_after_stream_outputs() == 0
