"""Single cases of the plugin's streamer that random lives seldom meet; each message is the engine's own too."""

from __future__ import annotations

import pytest
from plugged import plugged
from real import NEWER, Setting
from trio import make, take


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
