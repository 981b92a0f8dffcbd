"""What the random lives do not meet: bad inputs, the launch number coming round, inputs of any alignment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptxsim_runtime import PtxSimRuntime, compiled
from twins import Case, Twins

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import StepFailedError

CASE = Case(PackerConfig(vocab_size=60, capacity=40, window=8, max_accept=2), 16, 1)


def make(seed: int) -> Twins:
    twins = Twins(CASE, PtxSimRuntime(90, seed), seed)
    twins.admit([twins.request() for _ in range(CASE.config.capacity)])
    return twins


def ready(twins: Twins) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    handles = np.array(list(twins.requests), np.int64)
    return handles, twins.tokens(len(handles), 2), twins.scores(len(handles), 2)


@pytest.mark.parametrize("length", [-1, 3, 2**31 - 1, -(2**31), 2**32 + 1])
def test_a_bad_length_is_an_error_and_changes_nothing_of_its_row(length: int) -> None:
    twins = make(1)
    handles, tokens, scores = ready(twins)
    before = twins.backend.state_row(int(handles[20]) & 0xFFFFFFFF).copy()
    lens = np.ones(len(handles), np.int64)
    lens[20] = length
    ticket = twins.device.step(handles, tokens, accept_lens=lens, logprobs=scores)
    assert (twins.backend.state_row(int(handles[20]) & 0xFFFFFFFF) == before).all()
    other = twins.backend.state_row(int(handles[0]) & 0xFFFFFFFF)
    assert other[L.OUTPUT_LEN] == 1 or other[L.FLAGS] & L.STATE_CONVEYED, "the other rows were taken in"
    with pytest.raises(StepFailedError, match="accept_lens"):
        ticket.wait()


def test_missing_logprobs_are_an_error() -> None:
    twins = make(2)
    handles, tokens, _ = ready(twins)
    assert any(request.return_logprob for request in twins.requests.values())
    with pytest.raises(StepFailedError):
        twins.device.step(handles, tokens).wait()


def test_the_launch_number_comes_round_past_zero() -> None:
    twins = make(3)
    last = 2**31 - 1
    twins.backend._launch = last - 2
    twins.backend.scan[L.SCAN_LAUNCH] = last - 1
    numbers = []
    for _ in range(3):
        handles, tokens, scores = ready(twins)
        lens = np.ones(len(handles), np.int32)
        expected = twins.cpu.step(handles, tokens, accept_lens=lens, logprobs=scores).wait()
        got = twins.device.step(handles, tokens, accept_lens=lens, logprobs=scores).wait()
        numbers.append(got.header(L.H_LAUNCH))
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert got.column(L.R_FLAGS).tolist() == expected.column(L.R_FLAGS).tolist()
        expected.release()
        got.release()
    assert numbers == [last - 1, last, 1]


def test_alignment_of_inputs_chooses_no_variant() -> None:
    """In a serving loop nothing may compile because a sampler's tensor begins somewhere else."""
    twins = make(4)
    count = set()
    for shift in range(4):
        handles, tokens, scores = ready(twins)
        moved = np.zeros(tokens.size + shift, np.int32)[shift:].reshape(tokens.shape)
        moved[:] = np.clip(tokens, 0, 59)
        twins.device.step(handles, moved, accept_lens=np.ones(len(handles), np.int32), logprobs=scores).wait().release()
        count.add(compiled.cache_info().currsize)
    assert len(count) == 1
