"""layout.py: the field tables and the constants agree, and nothing overlaps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpupack.core import layout as L

TABLES = [
    ("state", L.STATE_FIELDS, "", {"stop_1", "stop_2", "stop_3", "stop_4", "stop_5"}),
    ("control", L.CONTROL_FIELDS, "CONTROL_", {"flags"}),
    ("header", L.HEADER_FIELDS, "H_", set()),
    ("row", L.ROW_FIELDS, "R_", set()),
    ("finish", L.FINISH_CODES, "FINISH_", set()),
]


@pytest.mark.parametrize(("fields", "prefix", "without"), [t[1:] for t in TABLES], ids=[t[0] for t in TABLES])
def test_constants_follow_the_table(fields: dict[str, str], prefix: str, without: set[str]) -> None:
    for place, name in enumerate(fields):
        if name not in without:
            assert getattr(L, prefix + name.upper()) == place


def test_fields_whose_constant_has_another_name() -> None:
    assert list(L.CONTROL_FIELDS).index("flags") == L.CONTROL_FLAGS_ROW
    assert [list(L.STATE_FIELDS).index(f"stop_{i}") for i in range(L.MAX_STOP_IDS)] == [
        L.STOP_0 + i for i in range(L.MAX_STOP_IDS)
    ]


def test_every_constant_is_in_its_table() -> None:
    """No constant names a field that the table has not."""
    for prefix, fields, others in (
        ("H_", L.HEADER_FIELDS, set()),
        ("R_", L.ROW_FIELDS, set()),
        ("FINISH_", L.FINISH_CODES, {"FINISH_CODES"}),
    ):
        names = {name for name in vars(L) if name.startswith(prefix)} - others
        assert names == {prefix + name.upper() for name in fields}


def test_widths() -> None:
    assert (L.STATE_WIDTH, L.CONTROL_WIDTH, L.ROW_WIDTH) == (16, 5, 11)
    assert L.STATE_WIDTH * L.WORD % 32 == 0, "a slot's state is whole sectors"
    assert L.STATE_WIDTH == L.STOP_0 + L.MAX_STOP_IDS
    assert len(L.HEADER_FIELDS) <= L.HEADER_WORDS
    assert L.HEADER_WORDS % L.ALIGN_WORDS == 0


def test_every_field_says_what_it_is() -> None:
    for _, fields, _, undocumented in TABLES:
        for name, doc in fields.items():
            assert doc or name in undocumented


def masks(prefix: str, without: set[str]) -> dict[str, int]:
    return {name: value for name, value in vars(L).items() if name.startswith(prefix) and name not in without}


STATE_BITS = masks("STATE_", {"STATE_FIELDS", "STATE_WIDTH", "STATE_FLAGS"})
CONTROL_BITS = {
    f"CONTROL_{name}": getattr(L, f"CONTROL_{name}") for name in ("SKIP", "HOLD", "FLUSH", "FINISH", "RETRACTED")
}
ROW_BITS = masks("ROW_", {"ROW_FIELDS", "ROW_WIDTH", "ROW_CODE_SHIFT"})


@pytest.mark.parametrize(
    "bits",
    [STATE_BITS, CONTROL_BITS, ROW_BITS, masks("MODE_", set()), masks("POLICY_", set())],
    ids=["state", "control", "row", "mode", "policy"],
)
def test_flags_are_single_bits_that_do_not_overlap(bits: dict[str, int]) -> None:
    assert len(bits) > 1
    seen = 0
    for name, bit in bits.items():
        assert bit > 0, name
        assert bit & (bit - 1) == 0, name
        assert not seen & bit, name
        seen |= bit


def test_state_flags_leave_room_for_stop_count_and_code() -> None:
    assert {f"STATE_{name.upper()}" for name in L.STATE_FLAGS} == set(STATE_BITS)
    flags = sum(STATE_BITS.values())
    stops, code = L.STOP_COUNT_MASK << L.STOP_COUNT_SHIFT, L.CODE_MASK << L.CODE_SHIFT
    assert not flags & stops
    assert not flags & code
    assert not stops & code
    assert (flags | stops | code) < 2**31, "an int32 holds it, sign aside"
    assert L.MAX_STOP_IDS <= L.STOP_COUNT_MASK
    assert max(range(len(L.FINISH_CODES))) <= L.CODE_MASK


def test_row_flags_leave_room_for_the_code() -> None:
    assert sum(ROW_BITS.values()) < 1 << L.ROW_CODE_SHIFT


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 31, 32, 33, 255, 256, 257])
@pytest.mark.parametrize("max_items", [1, 5, 8])
@pytest.mark.parametrize(
    ("logprobs", "family_words", "spec_width"), [(False, 0, 0), (True, 0, 8), (True, 35, 0), (True, 3, 9)]
)
def test_packed_sections_are_aligned_and_do_not_overlap(
    batch: int, max_items: int, logprobs: bool, family_words: int, spec_width: int
) -> None:
    layout = L.packed_layout(batch, L.PackedShape(max_items, logprobs, family_words, spec_width))
    sections = [(0, L.HEADER_WORDS)]
    for field in range(L.ROW_WIDTH):
        entries = batch + (field >= L.R_TOKEN_INDPTR)
        sections.append((layout.column(field), layout.column(field) + entries))
    for field in range(L.ROW_WIDTH, L.ROW_WIDTH + spec_width):
        sections.append((layout.column(field), layout.column(field) + batch))
    sections.append((layout.tokens, layout.tokens + batch * max_items))
    sections.append((layout.logprobs, layout.logprobs + batch * max_items * logprobs))
    sections.append((layout.families, layout.families + batch * family_words))
    for (_, end), (begin, _) in pairwise(sections):
        assert end <= begin
    assert sections[-1][1] <= layout.size
    assert all(begin % L.ALIGN_WORDS == 0 for begin, _ in sections)


@pytest.mark.parametrize(("words", "aligned"), [(0, 0), (1, 2), (2, 2), (3, 4)])
def test_align(words: int, aligned: int) -> None:
    assert L.align(words) == aligned


def test_wire_section_ids_are_unique() -> None:
    ids = [section.id for section in L.WIRE_SECTIONS.values()]
    assert len(set(ids)) == len(ids)
    assert min(ids) > 0
    assert {section.entries for section in L.WIRE_SECTIONS.values()} <= {
        "rows",
        "rows+1",
        "tokens",
        "logprobs",
        "families",
        "rows*spec_width",
        "bytes",
    }
