"""The random lives of test_lives.py through the Oracle and the interpreted kernel, at several block sizes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Life, lives
from test_lives import Harness, Play, Receiver

from gpupack.backends.cuda.host_runtime import InterpreterRuntime
from gpupack.core import layout as L
from gpupack.core.config import EmitPolicy, PackerConfig
from gpupack.core.request import Request
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer

LIVES = int(os.environ.get("GPUPACK_LIVES", "12"))
GUARD = 64  # words around each arena
CANARY = 0x5AFEC0DE


class GuardedRuntime(InterpreterRuntime):
    """The interpreter's runtime, with canaries around everything it gives out."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[Any] = []

    def zeros(self, words: int, dtype: Any) -> Any:
        memory = super().zeros(words + 2 * GUARD, dtype)
        memory[:GUARD] = memory[-GUARD:] = CANARY
        self._given.append(memory)
        return memory[GUARD:-GUARD]

    host = zeros

    def check(self) -> None:
        for memory in self._given:
            assert (memory[:GUARD] == CANARY).all()
            assert (memory[-GUARD:] == CANARY).all()


def harness(block: int) -> Harness:
    """Packers over the interpreted kernel with blocks of `block` rows."""

    def make(config: PackerConfig, **options: Any) -> Packer:
        from gpupack.backends.cuda.backend import TritonBackend

        packer = Packer(config, **options)
        packer.backend = TritonBackend(replace(config, device="interpret"), GuardedRuntime(), block=block)
        return packer

    def poison(packer: Packer, word: int) -> None:
        packer.backend.runtime.check()
        free = [buffer for buffer in packer.backend.ring.buffers if not buffer.busy]
        assert free
        for buffer in free:
            buffer.out.fill(word)

    return Harness(f"interpreter, blocks of {block}", make, poison)


# Batches of up to 8 rows: one block, two, and one for each row or two.
@pytest.mark.parametrize("block", [2, 4, 16])
def test_the_interpreted_kernel_equals_the_oracle(block: int) -> None:
    @given(lives())
    @settings(max_examples=LIVES)
    def play(life: Life) -> None:
        Play(harness(block), life.config, life.convey).play(life)

    play()


def test_the_default_policy_sends_everything_once() -> None:
    @given(lives(policy=st.just(EmitPolicy()), always_return_logprob=True))
    @settings(max_examples=LIVES)
    def play(life: Life) -> None:
        receiver = Receiver(harness(2), life.config, life.convey)
        receiver.play(life)
        receiver.abort_all()

    play()


@pytest.mark.parametrize("batch", [1, 15, 16, 17, 31, 32, 33])
def test_batches_on_both_sides_of_a_block_equal_the_cpu_loop(batch: int) -> None:
    config = PackerConfig(50, (2,), capacity=40, window=8, max_accept=3, stream_interval=3)
    packers = [Packer(config), harness(16).make(config)]
    random = np.random.default_rng(batch)
    requests = [
        Request(f"r{i}", return_logprob=bool(i % 2), judge="host" if i % 5 == 4 else "device") for i in range(batch)
    ]
    handles, same = (packer.admit(requests) for packer in packers)
    assert handles.tolist() == same.tolist()
    for _ in range(4):
        rows = random.permutation(handles)
        ids = random.integers(-1, 51, (batch, 3))
        scores = random.random((batch, 4)).astype(np.float32)
        lens = random.integers(0, 4, batch).astype(np.int32)
        steps = [packer.step(rows, ids, accept_lens=lens, logprobs=scores).wait() for packer in packers]
        assert steps[0].header_words == steps[1].header_words
        for column in range(L.ROW_WIDTH):
            assert steps[0].column(column).tolist() == steps[1].column(column).tolist()
        assert steps[0].token_ids.tolist() == steps[1].token_ids.tolist()
        assert steps[0].logprobs.tobytes() == steps[1].logprobs.tobytes()
        for step in steps:
            step.release()


@pytest.mark.parametrize("logprobs", [None, np.zeros((2, 1), np.float32)], ids=["token_ids", "logprobs"])
def test_an_accept_length_beyond_the_inputs_width_is_impossible(logprobs: Any) -> None:
    from gpupack.core.errors import StepFailedError

    packer = harness(16).make(PackerConfig(50, capacity=4, window=8, max_accept=3))
    handles = packer.admit([Request("a"), Request("b", return_logprob=logprobs is not None)])
    ids = np.zeros((2, 1 if logprobs is None else 3), np.int64)
    ticket = packer.step(handles, ids, accept_lens=np.array([1, 2], np.int32), logprobs=logprobs)
    with pytest.raises(StepFailedError, match="error 1"):
        ticket.wait()


def test_an_impossible_accept_length_raises_at_the_take_in_and_closes_the_packer() -> None:
    from gpupack.core.errors import ClosedError, StepFailedError

    packer = harness(16).make(PackerConfig(50, capacity=4, window=8, max_accept=2))
    handles = packer.admit([Request("a"), Request("b")])
    ticket = packer.step(handles, np.zeros((2, 2), np.int64), accept_lens=np.array([1, 3], np.int32))
    with pytest.raises(StepFailedError, match="step 1: the kernel reported launch 1, error 1"):
        ticket.wait()
    with pytest.raises(ClosedError):
        packer.step(handles, np.zeros(2, np.int64))


BAD_CONTROL = {
    "code 0": dict(flags=L.CONTROL_FINISH),
    "code 300": dict(flags=L.CONTROL_FINISH, finish_code=300),
    "hold and flush": dict(flags=L.CONTROL_HOLD | L.CONTROL_FLUSH),
    "unknown bit": dict(flags=64),
    "visible -2": dict(visible_len=-2),
}


@pytest.mark.parametrize("name", BAD_CONTROL)
def test_control_that_is_wrong_whatever_the_request_is_refused(name: str) -> None:
    from gpupack.core.errors import InputError

    packer = harness(16).make(PackerConfig(50, capacity=4, window=8))
    handles = packer.admit([Request("a"), Request("b")])
    control = Control(2).reset(2)
    for column, value in BAD_CONTROL[name].items():
        getattr(control, column)[1] = value
    with pytest.raises(InputError, match=r"control\.\w+: expected .*\(row 1\)"):
        packer.step(handles, np.zeros(2, np.int64), control=control)
    assert packer.step(handles, np.array([3, 4])).wait().token_ids.tolist() == [3, 4]


@pytest.mark.parametrize("asked", ["an end behind the output", "a backlog beyond the window"])
def test_control_that_does_not_fit_a_length_is_an_error_of_the_step(asked: str) -> None:
    from gpupack.core.errors import StepFailedError

    packer = harness(16).make(PackerConfig(50, capacity=4, window=4))
    handles = packer.admit([Request("a"), Request("b")])
    control = Control(2).reset(2)
    if asked.startswith("an end"):
        control.finish(1, 5, finished_len=9)
    else:
        control.visible_len[1] = 0
        for _ in range(3):
            packer.step(handles, np.zeros(2, np.int64), control=control).wait().release()
    ticket = packer.step(handles, np.zeros(2, np.int64), control=control)
    with pytest.raises(StepFailedError, match="a length in control out of range"):
        ticket.wait()


@pytest.mark.parametrize("stray", [1, 2, 3])
def test_a_launch_that_nobody_prepared_does_nothing_and_is_noticed(stray: int) -> None:
    from gpupack.core.errors import StepFailedError

    packer = harness(16).make(PackerConfig(50, capacity=4, window=8))
    handles = packer.admit([Request("a"), Request("b")])
    packer.step(handles, np.array([3, 4])).wait().release()
    before = packer.backend.arena.clone()
    for _ in range(stray):
        packer.enqueue()
    assert (packer.backend.arena == before).all()
    ticket = packer.step(handles, np.array([5, 6]))
    with pytest.raises(StepFailedError, match="a launch ran without prepare_launch"):
        ticket.wait()


def test_a_launch_that_is_too_small_for_its_batch_is_an_error_of_the_step() -> None:
    from gpupack.core.errors import StepFailedError

    packer = harness(2).make(PackerConfig(50, capacity=8, window=8))
    handles = packer.admit([Request(f"r{i}") for i in range(5)])
    packer.prepare_launch(handles, np.arange(5))
    packer.enqueue(4)
    ticket = packer.commit_launch()
    with pytest.raises(StepFailedError, match="more rows than the launch was made for"):
        ticket.wait()
