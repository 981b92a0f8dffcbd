"""A receiver that is killed while requests stream, and a new one that gets the rest."""

from __future__ import annotations

import time

import numpy as np
import pytest
from ends import wait_for_peer

from gpupack.core.config import PackerConfig
from gpupack.core.errors import PeerLostError
from gpupack.core.request import Request
from gpupack.demo.receiver_process import ReceiverProcess
from gpupack.packer.packer import Packer
from gpupack.streamer.output_streamer import OutputStreamer
from gpupack.transport.receiver import OutputReceiver
from gpupack.transport.sender import OutputSender

BATCH = 6
TOKENS = 40


def test_after_a_killed_receiver_a_new_one_gets_the_rest_of_every_live_request(tmp_path):
    config = PackerConfig(vocab_size=1000, capacity=BATCH, window=64)
    with ReceiverProcess(BATCH) as doomed:
        streamer = OutputStreamer(Packer(config), OutputSender(doomed.endpoint))
        requests = [Request(f"r{i}", [7, i], max_new_tokens=TOKENS, stream_interval=1 + i % 3) for i in range(BATCH)]
        handles = streamer.admit(requests)
        wait_for_peer(streamer.sender)
        for token in range(10):
            streamer.send(streamer.packer.step(handles, np.full(BATCH, token)))
        doomed._process.kill()
        killed = time.monotonic()
        token = 10
        with pytest.raises(PeerLostError, match=doomed.endpoint):  # noqa: PT012 - any step of the loop may meet it
            while time.monotonic() - killed < 1:
                ticket = streamer.packer.step(handles, np.full(BATCH, token))
                token += 1
                streamer.send(ticket)
                time.sleep(0.002)
    with OutputReceiver(f"ipc://{tmp_path}/second") as second:
        streamer.reopen(second.endpoint)
        streamer.send(ticket)  # the step that met the loss is not lost
        for later in range(token, TOKENS):
            streamer.send(streamer.packer.step(handles, np.full(BATCH, later)))
        got: dict[str, list[int]] = {}
        began: dict[str, int] = {}
        ended = set()
        while len(ended) < BATCH:
            step = second.recv(5000)
            assert step is not None
            for delta in step.deltas():
                if delta.opening is not None:
                    assert delta.opening.resumed
                    began[delta.rid] = delta.opening.tokens_before
                got.setdefault(delta.rid, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    assert delta.finish_reason == {"type": "length", "length": TOKENS}
                    assert delta.completion_tokens == TOKENS
                    ended.add(delta.rid)
        streamer.close()
    assert set(got) == {f"r{i}" for i in range(BATCH)}
    for rid, tokens in got.items():
        assert tokens == list(range(began[rid], TOKENS))
        assert began[rid] <= token - 1
