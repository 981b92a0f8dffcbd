"""Retraction at the packer: what the host gets back, with steps in flight and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import InputError
from gpupack.core.request import Request, Resume
from gpupack.packer.packer import Packer

EOS = 2
CONFIG = PackerConfig(100, eos_token_ids=(EOS,), capacity=2, window=8, max_accept=2, max_in_flight=3)


@pytest.fixture
def packer() -> Packer:
    return Packer(CONFIG)


def admit(packer: Packer, resume: Resume | None = None, **request: Any) -> np.ndarray:
    return packer.admit([Request("r", return_logprob=True, **request)], [resume])


def step(packer: Packer, handles: np.ndarray, *run: int) -> Any:
    ids = np.array([run], np.int64)
    return packer.step(handles, ids, accept_lens=np.array([len(run)], np.int32), logprobs=ids.astype(np.float32) / 4)


def test_items_of_rows_in_flight_come_back_too(packer: Packer) -> None:
    """The committed part of what a step in flight sends was never in a ring, or is no longer."""
    handles = admit(packer, stream_interval=3)
    step(packer, handles, 10).wait().release()
    step(packer, handles, 11).wait().release()
    flying = step(packer, handles, 12, 13), step(packer, handles, 14)
    resume = packer.retract(int(handles[0]), output_len=3)
    assert (resume.output_len, resume.token_cursor, resume.logprob_cursor) == (3, 1, 1)
    assert resume.unsent_tokens.tolist() == [11, 12]
    assert resume.unsent_logprobs.tolist() == [11 / 4, 3.0]
    assert [ticket.wait().rows for ticket in flying] == [0, 0]


@pytest.mark.parametrize("committed", [2, 3, 4, 5])
def test_every_committed_length_goes_on_without_a_hole(packer: Packer, committed: int) -> None:
    handles = admit(packer, stream_interval=3)
    sent = step(packer, handles, 10, 11).wait().token_ids.tolist()
    flying = step(packer, handles, 12), step(packer, handles, 13, 14)
    resume = packer.retract(int(handles[0]), output_len=committed)
    for ticket in flying:
        ticket.wait().release()
    handles = admit(packer, resume, stream_interval=1)
    packed = step(packer, handles, 20).wait()
    assert sent + packed.token_ids.tolist() == [*range(10, 10 + committed), 20]
    assert packed.logprobs.tolist() == [token / 4 for token in packed.token_ids.tolist()]


def test_a_finish_that_append_found_is_not_forgotten(packer: Packer) -> None:
    handles = admit(packer)
    packer.append(handles, np.array([EOS]), logprobs=np.zeros(1, np.float32)).wait().release()
    with pytest.raises(InputError, match=r"handle: expected a running request, \d+ has finished; pack sends its final"):
        packer.retract(int(handles[0]))
    packed = packer.pack(handles).wait()
    assert packed.token_ids.tolist() == [EOS]
    assert packed.column(L.R_FLAGS)[0] & L.ROW_FINAL


def test_a_finish_in_flight_that_was_not_committed_is_discarded(packer: Packer) -> None:
    handles = admit(packer, stream_interval=8)
    step(packer, handles, 10).wait().release()
    flying = packer.append(handles, np.array([EOS]), logprobs=np.zeros(1, np.float32))
    resume = packer.retract(int(handles[0]), output_len=1)
    flying.wait().release()
    handles = admit(packer, resume)
    packed = step(packer, handles, 11).wait()
    assert (packed.token_ids.tolist(), packed.header(L.H_FINISHED)) == ([11], 0)


def test_a_refused_admission_leaves_slots_and_generations_as_they_were(packer: Packer) -> None:
    with pytest.raises(InputError, match=r"resume\.unsent_tokens of r"):
        packer.admit([Request("first"), Request("r")], [None, Resume(output_len=3)])
    assert len(packer.slots) == 0
    first, second = packer.admit([Request("first"), Request("second")]).tolist()
    assert (first, second) == (1 << 32, (1 << 32) + 1)
