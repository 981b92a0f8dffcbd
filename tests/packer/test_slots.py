"""SlotTable: a handle names one request and never another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupack.core.errors import CapacityError, HandleError, InputError
from gpupack.core.request import Request
from gpupack.packer.slots import LAST_GENERATION, SlotTable


def some(count: int, name: str = "r") -> list[Request]:
    return [Request(f"{name}{i}") for i in range(count)]


def test_handle_is_generation_and_slot() -> None:
    table = SlotTable(3)
    handles = table.take(some(3))
    assert handles.dtype == np.int64
    assert sorted(handles & 0xFFFFFFFF) == [0, 1, 2]
    assert (handles >> 32 == 1).all()
    assert len(table) == 3


def test_too_many_changes_nothing() -> None:
    table = SlotTable(2)
    (kept,) = table.take(some(1))
    with pytest.raises(CapacityError, match="admit: 2 requests, 1 of 2 slots free"):
        table.take(some(2))
    assert table.live_handles().tolist() == [kept]
    assert len(table.take(some(1))) == 1, "the free slot is still there"


@pytest.mark.parametrize(
    "wrong",
    [-1, 0, 1 << 32 | 7, 2 << 32 | 1, 1 << 32 | 2, (1 << 32) + 0x80000000, -(1 << 32)],
    ids=["padding", "generation 0", "no such slot", "wrong generation", "free slot", "slot past int32", "negative"],
)
def test_wrong_handle_is_named_and_changes_nothing(wrong: int) -> None:
    table = SlotTable(3)
    first, second = table.take(some(2)).tolist()
    for call in (table.end, table.slots_of):
        with pytest.raises(HandleError, match=rf"handle {wrong} \(slot \d+, generation -?\d+\) is not live"):
            call(np.array([first, wrong], np.int64))
    with pytest.raises(HandleError):
        table.request(wrong)
    assert table.live_handles().tolist() == [first, second]


def test_a_handle_twice_ends_nothing() -> None:
    table = SlotTable(2)
    (handle,) = table.take(some(1)).tolist()
    with pytest.raises(InputError, match="handles: expected each handle once, got"):
        table.end(np.array([handle, handle], np.int64))
    assert table.live_handles().tolist() == [handle]


def test_last_generation_is_not_given_again() -> None:
    table = SlotTable(2)
    table.generations[:] = [LAST_GENERATION - 2, 5]
    given = []
    for _ in range(6):
        handles = table.take(some(min(2, len(table._free))))
        given += handles.tolist()
        table.end(handles)
    of_first = [handle >> 32 for handle in given if handle & 0xFFFFFFFF == 0]
    assert of_first == [LAST_GENERATION - 2, LAST_GENERATION - 1]
    assert max(handle >> 32 for handle in given) < 2**31, "a generation fits the int32 of the state"
    assert len(table._free) == 1
    with pytest.raises(CapacityError):
        table.take(some(2))


@given(st.lists(st.integers(0, 7), max_size=60))
@settings(max_examples=100)
def test_a_handle_never_names_a_new_request(choices: list[int]) -> None:
    """Requests come and go in a table of 3 slots; every handle names its request or nothing."""
    table, ever, live = SlotTable(3), {}, []
    for number, choice in enumerate(choices):
        if choice >= 3 and len(live) < 3:
            request = Request(f"r{number}")
            (handle,) = table.take([request]).tolist()
            assert handle not in ever
            ever[handle] = request
            live.append(handle)
        elif live:
            table.end(np.array([live.pop(choice % len(live))], np.int64))
        assert sorted(table.live_handles().tolist()) == sorted(live)
        for handle, request in ever.items():
            if handle in live:
                assert table.request(handle) is request
            else:
                with pytest.raises(HandleError):
                    table.request(handle)
