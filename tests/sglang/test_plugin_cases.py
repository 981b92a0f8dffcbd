"""Single cases of the plugin's streamer that random lives seldom meet; each message is the engine's own too."""

from __future__ import annotations

import pytest
import zmq
from plugged import plugged
from real import NEWER, Setting, io_struct
from trio import make, take

from gpupack.core.errors import WireError
from gpupack.sglang.receiver import NativeReceiver
from gpupack.wire.frame import MAGIC


@pytest.fixture(params=["compatible", "native"])
def streamer(request):
    """The plugin's streamer; it compares each message with the engine's, and no difference may be found."""
    made = plugged(Setting(), wire=request.param)
    yield made
    stats = made.streamer.gpupack.stats.snapshot()
    assert stats["verified"] == stats["steps"] > 0
    assert stats["differences"] == 0
    assert stats["fallbacks"] == {}


def test_a_retracted_request_without_output_keeps_its_first_logprob(streamer):
    req = make("a", return_logprob=True)
    req.reset_for_retract()
    assert streamer.stream([req], True).output_token_logprobs_val == [[]]
    req.is_retracted = False
    message = streamer.stream([take(req, 40).req], True)
    assert message.output_token_logprobs_val == [[-1.0] if NEWER else []]


@pytest.mark.parametrize("rid", ["r" * 5000, "\ud800"], ids=["too long", "a lone surrogate"])
def test_a_name_that_no_frame_carries_goes_as_a_message(rid, streamer):
    reqs = [make("a"), make(rid)]
    for token in (40, 41):
        message = streamer.stream([take(req, token).req for req in reqs], False)
        assert message.rids == ["a", rid]
        assert [list(ids) for ids in message.output_ids] == [[token], [token]]
    reqs[0].sampling_params.max_new_tokens = 3
    assert streamer.stream([take(reqs[0], 42).req], False).finished_reasons == [{"type": "length", "length": 3}]
    stats = streamer.streamer.gpupack.stats.snapshot()
    if stats["wire"] == "native":
        assert sum(stats["unframed"].values()) == 2
        assert stats["frames"] > 0


def test_an_end_behind_the_output_is_that_of_the_output(streamer):
    req = make("a", max_new_tokens=2)
    take(req, 40, 41)
    req.finished_len = 5
    message = streamer.stream([req], False)
    assert list(message.output_ids[0]) == [40, 41]
    assert message.completion_tokens == [2]


def test_the_request_to_skip_is_left_alone_even_if_it_has_finished(streamer):
    skipped, req = make("a", max_new_tokens=1), make("b", max_new_tokens=1)
    take(skipped, 40)
    message = streamer.stream([skipped, take(req, 41).req], False, skipped)
    assert message.rids == ["b"]
    assert message.finished_reasons == [{"type": "length", "length": 1}]
    assert not skipped.finished_output
    assert streamer.stream([skipped, req], False).rids == ["a"]


def test_a_batch_opens_again_after_it_went_as_a_message(streamer):
    reqs = [make("a"), make("b")]
    for info in (None, None, {"k": [1, 2, 3]}, None):
        reqs[0].customized_info = info
        message = streamer.stream([take(req, 40).req for req in reqs], False)
        assert message.rids == ["a", "b"]
        assert (message.customized_info is None) == (info is None)


def test_top_logprobs_of_another_number_than_asked_for_are_the_engines(streamer):
    reqs = [make("a", return_logprob=True), make("b", return_logprob=True)]
    for req, count in zip(reqs, (1, 3), strict=True):
        req.logprob.top_logprobs_num = 2
        take(req, 40)
        req.logprob.output_top_logprobs_val.append([-0.5] * count)
        req.logprob.output_top_logprobs_idx.append([7] * count)
    message = streamer.stream(reqs, True)
    assert message.output_top_logprobs_val == [[[-0.5]], [[-0.5] * 3]]


def test_a_frame_that_is_refused_says_why(caplog):
    """As the detokenizer's end takes it, over a real socket."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind("inproc://refused")
        push.connect("inproc://refused")
        push.send(MAGIC + bytes(100))
        receiver = NativeReceiver()
        with pytest.raises(WireError):
            receiver.receive(io_struct.sock_recv, pull)
    assert "refused" in caplog.text
    assert "FrameVersionError" in caplog.text


@pytest.mark.parametrize("wire", ["compatible", "native"])
def test_an_idle_batch_may_be_the_first_of_all(wire):
    streamer = plugged(Setting("plain"), wire=wire)
    streamer.stream([], False, idle=True)
    stats = streamer.streamer.gpupack.stats.snapshot()
    assert stats["verified"] == stats["steps"] == 1
    assert stats["differences"] == 0
