"""What the streamer does beside its rows: time-stats logging, the crash for tests, ranks without a socket."""

from __future__ import annotations

import logging

import pytest
from life import Part, Step
from ours import PRESET, Ours
from real import NEWER, RealStreamer, Setting
from told import request_of
from trio import make, take

from gpupack import OutputStreamer, Packer, PackerConfig
from gpupack.core.errors import CrashRequestedError

CRASH = "SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("wanted", [True, False])
def test_time_stats_are_logged_on_the_step_of_the_final_row(tmp_path, caplog, rank, wanted):
    setting = Setting(attn_tp_rank=rank, log_time_stats=wanted)
    real, logged = RealStreamer(setting), []
    hook = (lambda request: logged.append(request.rid)) if wanted else None
    caplog.set_level(logging.INFO)
    reqs = [make("short", max_new_tokens=2), make("long", max_new_tokens=3)]
    with Ours(setting, f"ipc://{tmp_path}/a", PRESET, log_time_stats=hook) as ours:
        for number in range(4):
            parts = [Part(req, stray=9) if req.finished() else take(req, number) for req in reqs]
            before = len(caplog.records), len(logged)
            ours.send(Step(parts))
            real.stream([part.req for part in parts], False)
            lines = [record.message for record in caplog.records[before[0] :] if "ReqTimeStats" in record.message]
            told = [line.split("rid=")[1].split(",")[0] for line in lines]
            assert told == logged[before[1] :]
            assert told == ([[], ["short"], ["long"], []][number] if wanted and rank == 0 else [])


@pytest.mark.parametrize("after", [1, 3])
def test_the_crash_for_tests_comes_after_sending_on_the_same_calls(tmp_path, monkeypatch, after):
    monkeypatch.setenv(CRASH, str(after))
    real = RealStreamer(Setting())
    with Ours(Setting(), f"ipc://{tmp_path}/a", PRESET) as ours:
        handles = ours.streamer.admit([request_of(make("a"))])

        def crashes(idle):
            """Whether this call raises, on both."""
            batch = handles[:0] if idle else handles
            try:
                real.stream([], False, idle=idle)
            except RuntimeError:
                with pytest.raises(CrashRequestedError):
                    ours.streamer.stream_output(batch, False, is_idle_batch=idle)
                return True
            ours.streamer.stream_output(batch, False, is_idle_batch=idle)
            return False

        calls = [(1, False), (1, True), (2, False), (3, False), (3, True), (4, False)]  # counted, idle
        assert [crashes(idle) for _, idle in calls] == [not idle and n >= after for n, idle in calls]


def test_a_rank_without_the_socket_sends_nothing():
    streamer = OutputStreamer(Packer(PackerConfig(vocab_size=9, capacity=4), convey=False), None)
    handles = streamer.admit([request_of(make("a"))])
    assert streamer.stream_output(handles, False).frame_bytes == 0
    streamer.close()


def test_the_version_is_the_one_that_the_environment_is_for():
    assert (PRESET.stream_rule == "unsent") == NEWER
