"""Packer: what it refuses and that nothing changes then, buffers, views, take-in, endings, closing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Oracle
from test_lives import counters_of, expected_counters, rows_of, state_of

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import (
    BufferBusyError,
    CapacityError,
    ClosedError,
    HandleError,
    InputError,
    ReleasedError,
)
from gpupack.core.request import Request, Resume
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.packer.slots import LAST_GENERATION

CONFIG = PackerConfig(100, capacity=4, window=16, max_accept=3, max_in_flight=2)


@pytest.fixture
def packer() -> Packer:
    return Packer(CONFIG, convey=False)


def admit(packer: Packer, *names: str, **request: Any) -> np.ndarray:
    return packer.admit([Request(name, **request) for name in names])


def tokens(count: int, width: int = 1) -> np.ndarray:
    return np.arange(count * width, dtype=np.int32).reshape(count, width)


def control(batch: int, row: int = 0, **columns: int) -> Control:
    asked = Control(8).reset(batch)
    for name, value in columns.items():
        getattr(asked, name)[row] = value
    return asked


# --- Bad input ------------------------------------------------------------------------------------

FINISH = {"flags": L.CONTROL_FINISH}

BAD_STEPS = {
    "handles: no array": (dict(handles=[1, 2]), "handles: expected an array or tensor, got list"),
    "handles: dtype": (dict(handles=np.zeros(2, np.int32)), "handles: expected dtype int64, got int32"),
    "handles: shape": (
        dict(handles=np.zeros((2, 1), np.int64)),
        r"handles: expected 1 dimensions, got shape \(2, 1\)",
    ),
    "handles: too many": (
        dict(handles=np.full(5, -1), token_ids=tokens(5), accept_lens=None, logprobs=None),
        "handles: expected at most max_batch = 4 rows, got 5",
    ),
    "handles: one twice": (dict(handles="same"), r"handles: expected each handle once, got \d+ again \(row 1\)"),
    "token_ids: dtype": (
        dict(token_ids=np.zeros((2, 3), np.float32)),
        "token_ids: expected dtype int64 or int32, got float32",
    ),
    "token_ids: rows": (
        dict(token_ids=tokens(3)),
        r"token_ids: expected 2 rows, one for each handle, got shape \(3, 1\)",
    ),
    "token_ids: dimensions": (
        dict(token_ids=np.zeros((2, 1, 1), np.int32)),
        r"token_ids: expected 1 or 2 dimensions, got shape \(2, 1, 1\)",
    ),
    "accept_lens: dtype": (
        dict(accept_lens=np.ones(2, np.int16)),
        "accept_lens: expected dtype int32 or int64, got int16",
    ),
    "accept_lens: rows": (dict(accept_lens=np.ones(1, np.int32)), "accept_lens: expected 2 rows, one for each handle"),
    "accept_lens: negative": (
        dict(accept_lens=np.array([1, -1])),
        r"accept_lens: expected 0 to 3, got -1 \(row 1\)",
    ),
    "accept_lens: over max_accept": (
        dict(accept_lens=np.array([1, 4]), token_ids=tokens(2, 5), logprobs=np.zeros((2, 5), np.float32)),
        r"accept_lens: expected 0 to 3, got 4 \(row 1\)",
    ),
    "accept_lens: over the width of token_ids": (
        dict(accept_lens=np.array([1, 3]), token_ids=tokens(2, 2)),
        r"accept_lens: expected 0 to 2, got 3 \(row 1\)",
    ),
    "accept_lens: over the width of logprobs": (
        dict(accept_lens=np.array([1, 3]), logprobs=np.zeros((2, 2), np.float32)),
        r"accept_lens: expected 0 to 2, got 3 \(row 1\)",
    ),
    "accept_lens: would wrap to 1": (
        dict(accept_lens=np.array([1, 2**32 + 1])),
        r"accept_lens: expected 0 to 3, got 2147483647 \(row 1\)",
    ),
    "token_ids: no columns": (
        dict(token_ids=np.zeros((2, 0), np.int32)),
        r"accept_lens: expected 0 to 0, got 1 \(row 0\)",
    ),
    "logprobs: dtype": (dict(logprobs=np.zeros((2, 3))), "logprobs: expected dtype float32, got float64"),
    "logprobs: rows": (dict(logprobs=np.zeros((1, 3), np.float32)), "logprobs: expected 2 rows, one for each handle"),
    "logprobs: missing": (
        dict(logprobs=None),
        r"logprobs: expected, the request of handle \d+ asked for them, got None \(row 0\)",
    ),
    "control: rows": (dict(control=control(3)), "control: expected 2 rows, one for each handle, got 3"),
    "control: no rows": (dict(control=control(0)), "control: expected 2 rows, one for each handle, got 0"),
    "control.flags: unknown": (dict(control=control(2, 1, flags=32)), r"control.flags: .*, got 32 \(row 1\)"),
    "control.flags: HOLD with FLUSH": (
        dict(control=control(2, 1, flags=L.CONTROL_HOLD | L.CONTROL_FLUSH)),
        r"control.flags: expected .*not HOLD with FLUSH, got 6 \(row 1\)",
    ),
    "control.finish_code: none": (
        dict(control=control(2, 1, **FINISH)),
        r"control.finish_code: expected 1 to 5 with FINISH, got 0 \(row 1\)",
    ),
    "control.finish_code: unknown": (
        dict(control=control(2, 1, **FINISH, finish_code=6)),
        r"control.finish_code: expected 1 to 5 with FINISH, got 6 \(row 1\)",
    ),
    "control.finished_len: behind the output": (
        dict(control=control(2, 1, **FINISH, finish_code=5, finished_len=4)),
        r"control.finished_len: expected -1 to the output length 3, got 4 \(row 1\)",
    ),
    "control.finished_len: negative": (
        dict(control=control(2, 1, **FINISH, finish_code=5, finished_len=-2)),
        r"control.finished_len: expected .*, got -2 \(row 1\)",
    ),
    "control.visible_len: negative": (
        dict(control=control(2, 1, visible_len=-2)),
        r"control.visible_len: expected .*, got -2 \(row 1\)",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_bad_step_is_named_and_changes_nothing(packer: Packer, change: dict[str, Any], message: str) -> None:
    handles = admit(packer, "a", "b", return_logprob=True, stream_interval=5)
    scores = np.zeros((2, 3), np.float32)
    good = dict(handles=handles, token_ids=tokens(2, 3), accept_lens=np.array([2, 1]), logprobs=scores)
    packer.step(**good).wait().release()  # so that there is something to change
    call = good | {"accept_lens": np.array([1, 2])} | change
    if isinstance(call["handles"], str):
        call["handles"] = handles[[0, 0]]
    before = [state_of(packer, handle) for handle in handles.tolist()]
    free = len(packer.backend._free)
    with pytest.raises(InputError, match=message):
        packer.step(**call)
    assert [state_of(packer, handle) for handle in handles.tolist()] == before
    assert len(packer.backend._free) == free
    packed = packer.step(**good).wait()
    assert packed.header(L.H_LAUNCH) == 2, "a refused call is no launch"


def test_what_stands_in_padding_and_stale_rows_is_not_looked_at(packer: Packer) -> None:
    (handle,) = admit(packer, "a").tolist()
    handles = np.array([-1, -1, handle, 99 << 32], np.int64)
    lens = np.array([-5, 1000, 1, 77], np.int64)
    packed = packer.step(handles, tokens(4), accept_lens=lens).wait()
    assert (packed.rows, packed.header(L.H_STALE), packed.token_ids.tolist()) == (1, 1, [2])


def test_visible_length_must_leave_no_more_than_the_window_holds(packer: Packer) -> None:
    (handle,) = admit(packer, "a").tolist()
    handles, limit = np.array([handle]), CONFIG.backlog_limit
    assert limit == 13
    for _ in range(limit):
        packer.step(handles, tokens(1), control=control(1, visible_len=0)).wait().release()
    message = rf"control\.visible_len: expected -1 or .*\b{limit}\b.*\b{limit + 1}, got 0 \(row 0\)"
    with pytest.raises(InputError, match=message):
        packer.step(handles, tokens(1), control=control(1, visible_len=0))
    packed = packer.step(handles, tokens(1), control=control(1, visible_len=1)).wait()
    assert (packed.rows, packed.header(L.H_TOKENS)) == (1, 1)


def test_visible_length_must_leave_no_more_logprobs_than_the_window_holds(packer: Packer) -> None:
    """The logprobs may be further behind than the tokens: then their window is the one that counts."""
    handles = admit(packer, "a", return_logprob=True)
    scores = np.zeros(1, np.float32)
    for _ in range(CONFIG.backlog_limit):
        packer.step(handles, tokens(1), logprobs=scores, return_logprob=False).wait().release()
    asked = control(1, visible_len=0)
    with pytest.raises(InputError, match=r"control\.visible_len: expected"):
        packer.step(handles, tokens(1), logprobs=scores, control=asked, return_logprob=False)
    packed = packer.step(handles, tokens(1), logprobs=scores, return_logprob=False).wait()
    assert packed.header(L.H_LOGPROBS) == CONFIG.backlog_limit + 1


def test_control_on_a_request_that_has_finished_is_not_looked_at(packer: Packer) -> None:
    """With the overlap schedule the host may ask something of a request that it does not know ended."""
    handles = admit(packer, "a", max_new_tokens=1)
    assert packer.step(handles, tokens(1)).wait().header(L.H_FINISHED) == 1
    packed = packer.step(handles, tokens(1), control=control(1, **FINISH, finish_code=5, finished_len=2)).wait()
    assert (packed.rows, packed.header(L.H_LATE)) == (0, 1)


BAD_ADMISSIONS = {
    "logprobs that the packer has not": (
        Request("bad", return_logprob=True),
        None,
        "return_logprob of bad: expected False with PackerConfig",
    ),
    "too many stop ids for the device": (
        Request("bad", judge="device", stop_token_ids=range(8)),
        None,
        "stop_token_ids of bad: expected at most 6 ids .* got 8",
    ),
    "resume: fewer tokens than unsent": (
        Request("bad"),
        Resume(output_len=3, token_cursor=1, unsent_tokens=np.zeros(1, np.int32)),
        r"resume.unsent_tokens of bad: expected 2 items.*, got 1",
    ),
    "resume: more than the window holds": (
        Request("bad"),
        Resume(output_len=20, unsent_tokens=np.zeros(20, np.int32)),
        r"resume.unsent_tokens of bad: .*at most 13\b.*, got 20",
    ),
    "resume: cursor behind the output": (
        Request("bad"),
        Resume(output_len=3, token_cursor=4),
        r"resume.token_cursor of bad: expected 0 to 3, got 4",
    ),
    "resume: negative cursor": (
        Request("bad"),
        Resume(output_len=0, token_cursor=-1, unsent_tokens=np.zeros(1, np.int32)),
        r"resume.token_cursor of bad: expected 0 to .*, got -1",
    ),
}


@pytest.mark.parametrize(("request_", "resume", "message"), BAD_ADMISSIONS.values(), ids=BAD_ADMISSIONS)
def test_bad_admission_admits_nothing(request_: Request, resume: Resume | None, message: str) -> None:
    packer = Packer(PackerConfig(100, capacity=4, window=16, max_accept=3, logprobs=False))
    kept = admit(packer, "kept")
    before = state_of(packer, int(kept[0]))
    with pytest.raises(InputError, match=message):
        packer.admit([Request("good"), request_], [None, resume])
    assert packer.slots.live_handles().tolist() == kept.tolist()
    assert state_of(packer, int(kept[0])) == before
    assert len(admit(packer, "x", "y", "z")) == 3, "every other slot is still free"


def test_resume_entries_must_match(packer: Packer) -> None:
    with pytest.raises(InputError, match="resume: expected 1 entries, one for each request, got 2"):
        packer.admit([Request("a")], [None, None])


def test_no_slots_left(packer: Packer) -> None:
    handles = admit(packer, "a", "b", "c")
    with pytest.raises(CapacityError, match="2 requests, 1 of 4 slots free"):
        admit(packer, "d", "e")
    assert packer.slots.live_handles().tolist() == handles.tolist()


# --- Buffers and views ----------------------------------------------------------------------------


def test_all_buffers_in_use(packer: Packer) -> None:
    handles = admit(packer, "a", stream_interval=9)
    held = [packer.step(handles, tokens(1)).wait() for _ in range(CONFIG.buffers)]
    before = state_of(packer, int(handles[0]))
    with pytest.raises(BufferBusyError, match=f"all {CONFIG.buffers} packed steps are in use"):
        packer.step(handles, tokens(1))
    assert state_of(packer, int(handles[0])) == before
    assert [packed.header(L.H_LAUNCH) for packed in held] == [1, 2, 3], "what is being read was not written"
    held[1].release()
    packed = packer.step(handles, tokens(1)).wait()
    assert packed.header(L.H_LAUNCH) == 4
    assert np.shares_memory(packed.buffer, held[0].buffer) is False


def test_views_refuse_use_after_release(packer: Packer) -> None:
    handles = admit(packer, "a")
    packed = packer.step(handles, tokens(1)).wait()
    assert packed.rows == 1
    packed.release()
    for use in (
        lambda: packed.rows,
        lambda: packed.handles,
        lambda: packed.token_ids,
        lambda: packed.logprobs,
        lambda: packed.token_indptr,
        lambda: packed.logprob_indptr,
        lambda: packed.header(L.H_LATE),
        lambda: packed.column(L.R_FLAGS),
        lambda: packed.drop_rows(np.zeros(1, bool)),
    ):
        with pytest.raises(ReleasedError, match="was released"):
            use()


def test_releasing_twice_gives_the_buffer_back_once(packer: Packer) -> None:
    packed = packer.step(admit(packer, "a"), tokens(1)).wait()
    packed.release()
    packed.release()
    free = packer.backend._free
    assert len(free) == CONFIG.buffers
    assert len({buffer.ctypes.data for buffer in free}) == CONFIG.buffers


# --- Taking in ------------------------------------------------------------------------------------


def test_steps_are_taken_in_in_order_and_once(packer: Packer) -> None:
    handles = admit(packer, "a")
    first, second = (packer.step(handles, tokens(1)) for _ in range(2))
    with pytest.raises(InputError, match="taken in once, in the order of their launch"):
        second.wait()
    assert first.wait().header(L.H_LAUNCH) == 1
    with pytest.raises(InputError, match="taken in once, in the order of their launch"):
        first.wait()
    assert second.wait().header(L.H_LAUNCH) == 2


def test_too_many_in_flight(packer: Packer) -> None:
    handles = admit(packer, "a", stream_interval=9)
    tickets = [packer.step(handles, tokens(1)) for _ in range(CONFIG.max_in_flight)]
    before = state_of(packer, int(handles[0]))
    with pytest.raises(InputError, match="expected at most max_in_flight = 2 steps"):
        packer.step(handles, tokens(1))
    assert state_of(packer, int(handles[0])) == before
    tickets[0].wait().release()
    packer.step(handles, tokens(1))


@given(st.data())
@settings(max_examples=60)
def test_rows_that_became_stale_are_dropped_at_take_in(data: st.DataObject) -> None:
    """Any subset of a batch ends, retired or retracted, while a step of it is in flight."""
    count = data.draw(st.integers(1, 6), "rows")
    config = PackerConfig(100, capacity=6, window=16, max_accept=3)
    sides: list[Any] = [Packer(config), Oracle(config)]
    asks = data.draw(st.lists(st.booleans(), min_size=count, max_size=count), "who asks for logprobs")
    judges = data.draw(st.lists(st.sampled_from(["device", "host"]), min_size=count, max_size=count), "judges")
    requests = [Request(f"r{i}", judge=judges[i], return_logprob=asks[i], max_new_tokens=2 + i) for i in range(count)]
    handles = sides[0].admit(requests)
    assert handles.tolist() == sides[1].admit(requests)
    lens = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count), "accept_lens"), np.int32)
    inputs = dict(accept_lens=lens, logprobs=-np.arange(count * 3, dtype=np.float32).reshape(count, 3))
    tickets = [side.step(handles, 10 + tokens(count, 3), **inputs) for side in sides]
    ending = data.draw(st.lists(st.integers(0, count - 1), unique=True), "who ends")
    for row in ending:
        # A host-judged request is retracted through the streamer's gate, which retires its handle here.
        retract = judges[row] == "device" and data.draw(st.booleans(), "retract")
        for side in sides:
            if retract:
                side.retract(int(handles[row]), output_len=0)
            else:
                side.retire(handles[[row]])
    packed, expected = (ticket.wait() for ticket in tickets)
    assert rows_of(packed) == expected.rows
    assert counters_of(packed) == expected_counters(expected)
    assert sides[0].dropped_rows == sides[1].dropped_rows
    assert not set(packed.handles.tolist()) & set(handles[ending].tolist())


def test_a_slot_given_anew_while_a_step_is_in_flight(packer: Packer) -> None:
    """The row of the old handle is dropped, though its slot is live again under the next."""
    (old,) = admit(packer, "old").tolist()
    ticket = packer.step(np.array([old]), tokens(1))
    packer.retire(np.array([old]))
    (new,) = admit(packer, "new").tolist()
    assert new & 0xFFFFFFFF == old & 0xFFFFFFFF
    assert ticket.wait().rows == 0
    assert packer.dropped_rows == 1
    assert state_of(packer, new)["output_len"] == 0


def test_late_counts_rows_whose_tokens_were_dropped(packer: Packer) -> None:
    """Behind the final row: a row with tokens is late, one without is nothing at all."""
    handles = admit(packer, "a", max_new_tokens=1)
    packer.step(handles, tokens(1)).wait().release()
    late = [
        packer.step(handles, tokens(1, 3), accept_lens=np.array([2])).wait().header(L.H_LATE),
        packer.step(handles, tokens(1), accept_lens=np.array([0])).wait().header(L.H_LATE),
        packer.pack(handles).wait().header(L.H_LATE),
    ]
    assert late == [1, 0, 0]


# --- Ending ---------------------------------------------------------------------------------------


def test_retract_needs_to_know_what_was_committed(packer: Packer) -> None:
    (handle,) = admit(packer, "a", stream_interval=9).tolist()
    packer.step(np.array([handle]), tokens(1)).wait().release()
    ticket = packer.step(np.array([handle]), tokens(1))
    with pytest.raises(InputError, match="output_len: expected, 1 steps are in flight, got None"):
        packer.retract(handle)
    for wrong in (0, 3):
        with pytest.raises(InputError, match=rf"output_len: expected 1 to 2, got {wrong}"):
            packer.retract(handle, output_len=wrong)
    assert packer.slots.live_handles().tolist() == [handle]
    ticket.wait().release()
    resume = packer.retract(handle)
    assert (resume.output_len, resume.token_cursor, resume.unsent_tokens.tolist()) == (2, 1, [0])


def test_a_request_that_has_sent_its_final_row_cannot_be_retracted(packer: Packer) -> None:
    (handle,) = admit(packer, "a", max_new_tokens=1).tolist()
    packer.step(np.array([handle]), tokens(1)).wait().release()
    with pytest.raises(InputError, match=r"expected a running request, .* has sent its final row"):
        packer.retract(handle)
    assert packer.slots.live_handles().tolist() == [handle]
    packer.retire(np.array([handle]))


@pytest.mark.parametrize("end", ["retire", "retract"])
def test_an_ended_handle_is_not_live(packer: Packer, end: str) -> None:
    (handle,) = admit(packer, "a").tolist()
    packer.retire(np.array([handle])) if end == "retire" else packer.retract(handle)
    with pytest.raises(HandleError, match=f"handle {handle} "):
        packer.retire(np.array([handle]))
    with pytest.raises(HandleError, match=f"handle {handle} "):
        packer.retract(handle)
    packed = packer.step(np.array([handle]), tokens(1)).wait()
    assert (packed.rows, packed.header(L.H_STALE)) == (0, 1)


def test_retiring_one_that_is_not_live_ends_none(packer: Packer) -> None:
    handles = admit(packer, "a", "b")
    with pytest.raises(HandleError):
        packer.retire(np.array([handles[0], 77 << 32]))
    assert packer.slots.live_handles().tolist() == handles.tolist()
    assert packer.step(handles, tokens(2)).wait().rows == 2


def test_slot_at_its_last_generation_is_not_given_again() -> None:
    packer = Packer(PackerConfig(100, capacity=1, window=16))
    packer.slots.generations[0] = LAST_GENERATION - 1
    (handle,) = admit(packer, "last").tolist()
    packed = packer.step(np.array([handle]), tokens(1)).wait()
    assert packed.handles.tolist() == [handle], "the generation survives 32 bits"
    packer.retire(np.array([handle]))
    with pytest.raises(CapacityError, match="0 of 1 slots free"):
        admit(packer, "one more")


# --- Closing --------------------------------------------------------------------------------------


def test_close(packer: Packer) -> None:
    handles = admit(packer, "a")
    taken_in = packer.step(handles, tokens(1)).wait()
    ticket = packer.step(handles, tokens(1))
    packer.close()
    packer.close()
    for call in (
        lambda: admit(packer, "b"),
        lambda: packer.step(handles, tokens(1)),
        lambda: packer.append(handles, tokens(1)),
        lambda: packer.pack(handles),
        lambda: packer.retire(handles),
        lambda: packer.retract(int(handles[0])),
        lambda: ticket.wait(),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert taken_in.token_ids.tolist() == [0], "what was taken in may still be read"


# --- Inputs as they come --------------------------------------------------------------------------


def test_tensors_and_strided_arrays(packer: Packer) -> None:
    torch = pytest.importorskip("torch")
    handles = admit(packer, "a", "b", return_logprob=True)
    wide = np.arange(16, dtype=np.int64).reshape(2, 8)
    scores = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    packed = packer.step(
        torch.from_numpy(handles), wide[:, ::4], accept_lens=torch.tensor([2, 1]), logprobs=scores
    ).wait()
    assert packed.token_ids.tolist() == [0, 4, 8]
    assert packed.logprobs.tolist() == [-1.0, -2.0, -3.0]


def test_empty_batch(packer: Packer) -> None:
    admit(packer, "a")
    for packed in (
        packer.step(np.empty(0, np.int64), np.empty((0, 1), np.int32)).wait(),
        packer.pack(np.empty(0, np.int64), control=control(0)).wait(),
    ):
        assert (packed.rows, packed.header(L.H_BATCH), packed.token_indptr.tolist()) == (0, 0, [0])


# --- What a review found --------------------------------------------------------------------------


def test_a_step_without_tokens_is_refused() -> None:
    packer = Packer(PackerConfig(100, capacity=4, window=8))
    handles = packer.admit([Request("a")])
    for call in (packer.step, packer.append):
        with pytest.raises(InputError, match="token_ids: expected an array or tensor, got None"):
            call(handles, None)
    assert packer.step(handles, np.array([5])).wait().token_ids.tolist() == [5]


@pytest.mark.parametrize("name", ["logprobs", "token_ids"])
def test_tensors_that_numpy_cannot_hold_are_refused_by_name(name: str) -> None:
    import torch

    packer = Packer(PackerConfig(100, capacity=4, window=8))
    handles = packer.admit([Request("a", return_logprob=True)])
    inputs = {"token_ids": torch.tensor([5]), "logprobs": torch.zeros(1)}
    with pytest.raises(InputError, match=f"{name}: expected dtype .*, got bfloat16"):
        packer.step(handles, **inputs | {name: torch.zeros(1, dtype=torch.bfloat16)})
    tracked = torch.zeros(1, requires_grad=True)
    assert packer.step(handles, **inputs | {"logprobs": tracked}).wait().logprobs.tolist() == [0]


def test_a_launch_is_made_for_as_many_rows_as_there_can_be() -> None:
    packer = Packer(PackerConfig(100, capacity=4, window=8))
    for rows in (0, 5, 10**6):
        with pytest.raises(InputError, match=f"batch_capacity: expected 1 to max_batch = 4, got {rows}"):
            packer.enqueue(rows)


def test_a_resume_out_of_range_takes_no_slot() -> None:
    packer = Packer(PackerConfig(100, capacity=4, window=8))
    for resume in (Resume(output_len=2**40, token_cursor=2**40), Resume(logprob_cursor=-5)):
        with pytest.raises(InputError, match=r"resume\.\w+ of a: expected 0 to"):
            packer.admit([Request("a")], [resume])
    assert len(packer.slots) == 0


def test_a_prepared_launch_keeps_what_it_was_told() -> None:
    packer = Packer(PackerConfig(100, capacity=4, window=8))
    handles = packer.admit([Request("a"), Request("b")])
    control = Control(2).reset(2)
    control.flags[0] = L.CONTROL_SKIP
    with pytest.raises(InputError, match="token_ids: expected 2 rows"):
        packer.prepare_launch(handles, np.array([1, 2, 3]))
    tokens = np.array([1, 2])
    packer.prepare_launch(handles, tokens, control=control)
    control.reset(2)
    with pytest.raises(InputError, match="commit_launch"):
        packer.step(handles, tokens)
    packer.enqueue()
    packed = packer.commit_launch().wait()
    assert packed.token_ids.tolist() == [2]


def test_a_row_that_is_skipped_may_have_any_length() -> None:
    packer = Packer(PackerConfig(100, capacity=4, window=8, speculative=True, max_accept=2))
    handles = packer.admit([Request("a"), Request("b")])
    control = Control(2).reset(2)
    control.flags[0] = L.CONTROL_SKIP
    ids, lens = np.zeros((2, 2), np.int64), np.array([5, 1])
    packed = packer.step(
        handles, ids, accept_lens=lens, control=control, verify=False, cap_lens=np.array([9, 9])
    ).wait()
    assert packed.column(L.R_BATCH_INDEX).tolist() == [1]


@pytest.mark.parametrize("made", ["read-only", "unaligned", "other byte order"])
def test_arrays_that_loops_do_not_take_are_copied(made):
    packer = Packer(PackerConfig(vocab_size=100, capacity=4, eos_token_ids=(), logprobs=True, max_top_logprobs=2))
    handles = packer.admit([Request("a", [1], return_logprob=True, top_logprobs_num=2)])
    inputs = {
        "handles": handles,
        "token_ids": np.array([7]),
        "logprobs": np.array([-0.5], np.float32),
        "top_logprobs_val": np.array([[-0.5, -2.0]], np.float32),
        "top_logprobs_idx": np.array([[7, 9]]),
    }
    step = packer.step(**{name: _odd(array, made) for name, array in inputs.items()}).wait()
    assert step.token_ids.tolist() == [7]
    assert step.families.tolist() == [*np.array([-0.5, -2.0], np.float32).view(np.int32).tolist(), 7, 9]


def _odd(array, made):
    """The same values in an array of another kind."""
    if made == "unaligned":
        odd = np.frombuffer(bytearray(b"x" + array.tobytes()), array.dtype, offset=1).reshape(array.shape)
        assert not odd.flags.aligned
        return odd
    odd = array.astype(array.dtype.newbyteorder(">")) if made == "other byte order" else array.copy()
    odd.setflags(write=made != "read-only")
    return odd
