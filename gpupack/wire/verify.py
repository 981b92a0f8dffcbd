"""What a reader checks of a frame before it believes any of it (docs/wire.md), one error class a cause.

Nothing is allocated from a number in the frame before that number was checked against the size of
the message. Columns are checked whole, never row by row.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gpupack.core import layout as L
from gpupack.core.errors import (
    FrameMagicError,
    FrameSectionError,
    FrameTruncatedError,
    FrameValueError,
    FrameVersionError,
)
from gpupack.wire.frame import (
    ALIGN,
    ENTRY_BYTES,
    ENTRY_FIELDS,
    FLAG_IDLE,
    FLAG_LOGPROBS,
    HEADER,
    MAGIC,
    MAX_SECTIONS,
    TABLES,
    VERSION,
    Frame,
    Header,
    Int32,
    Plan,
    check_size,
    plan_frame,
    table_shape,
)

CODE_MASK = L.CODE_MASK << L.ROW_CODE_SHIFT
ROW_MASK = L.ROW_FINAL | L.ROW_EARLY | L.ROW_OPENING | L.ROW_RESTARTED | L.ROW_HIDDEN_TOKEN | CODE_MASK
ROWS, STEP = Header._fields.index("rows"), Header._fields.index("step")
LAST_CODE = len(L.FINISH_CODES) - 1


def peek(view: memoryview, max_frame_bytes: int) -> Header:
    """Read the header and check it against the size of the message.

    Raises FrameTruncatedError, FrameTooLargeError, FrameMagicError, FrameVersionError or, for flags,
    rank and reserved bytes, FrameValueError.
    """
    if len(view) < HEADER.size:
        raise FrameTruncatedError(f"frame: expected at least {HEADER.size} bytes, got {len(view)}")
    check_size(len(view), max_frame_bytes)
    header = Header._make(HEADER.unpack_from(view))
    if header.magic != MAGIC:
        raise FrameMagicError(f"magic: expected {MAGIC!r}, got {header.magic!r}")
    if header.version != VERSION:
        raise FrameVersionError(f"version: expected {VERSION}, got {header.version}")
    if header.frame_bytes != len(view) or len(view) % ALIGN:
        raise FrameTruncatedError(
            f"frame_bytes: expected the message's {len(view)}, a multiple of {ALIGN}, got {header.frame_bytes}"
        )
    if header.flags & ~(FLAG_IDLE | FLAG_LOGPROBS) or header.reserved:
        raise FrameValueError(f"header: expected known flags and reserved bytes 0, got flags {header.flags:#x}")
    if header.flags & FLAG_IDLE and header.rows:
        raise FrameValueError(f"rows: expected 0 in the frame of an idle batch, got {header.rows}")
    if header.dp_rank < 0:
        raise FrameValueError(f"dp_rank: expected at least 0, got {header.dp_rank}")
    return header


def check_table(view: memoryview, header: Header) -> Plan:
    """Check the section table and return where the sections are; raises FrameSectionError.

    The header's counts and the set of sections leave one possible table: the one found must equal it,
    and the frame must end where it ends.
    """
    count, end = header.sections, HEADER.size + ENTRY_BYTES * header.sections
    if count > MAX_SECTIONS or end > len(view):
        raise FrameSectionError(f"sections: expected at most {MAX_SECTIONS} inside the frame, got {count}")
    # Step after step comes with the same table and the same numbers, and nothing else decides.
    counts = Header._make((MAGIC, VERSION, count, 0, 0, 0, *header[ROWS:STEP], 0, *header[STEP + 1 :]))
    return _checked(counts, bytes(view[HEADER.size : end]), len(view))


@lru_cache(maxsize=64)
def _checked(header: Header, table: bytes, size: int) -> Plan:
    """What `check_table` does, of a message of `size` bytes."""
    entries = TABLES[header.sections].unpack(table)
    plan = plan_frame(table_shape(header, entries))
    if entries != plan.entries:
        expected, got = (
            [e[i : i + ENTRY_FIELDS] for i in range(0, len(e), ENTRY_FIELDS)] for e in (plan.entries, entries)
        )
        wrong = next((pair for pair in zip(expected, got, strict=False) if pair[0] != pair[1]), (expected, got))
        raise FrameSectionError(
            f"section table: expected (id, dtype, offset, count, reserved) {wrong[0]}, got {wrong[1]}"
        )
    if plan.size != size:
        raise FrameSectionError(f"sections: expected to end at {size}, the frame's size, got {plan.size}")
    if header.logprobs and not header.flags & FLAG_LOGPROBS:
        raise FrameSectionError(f"logprobs: expected 0 without logprob sections, got {header.logprobs}")
    if header.families and not header.logprobs:
        raise FrameSectionError(f"families: expected 0 words without logprobs, got {header.families}")
    width = header.spec_width
    if width and (width < L.spec_width(1) or (width - L.SPEC_HISTOGRAMS) % 2):
        raise FrameSectionError(f"spec_width: expected 0 or an even number from {L.spec_width(1)}, got {width}")
    return plan


def check_padding(words: Int32, view: memoryview, plan: Plan) -> None:
    """Raise FrameValueError if a byte between two sections, or behind the side record, is not 0."""
    for at in plan.pads:
        if words[at]:
            raise FrameValueError(f"padding: expected 0, got {words[at]} at byte {at * L.WORD}")
    if plan.side[1] and any(view[plan.side[1] :]):
        raise FrameValueError("padding: expected 0 behind the side record")


def _check_indptr(name: str, indptr: Int32, items: int) -> None:
    first, last = int(indptr[0]), int(indptr[-1])
    if first != 0 or last != items:
        raise FrameValueError(f"{name}: expected to run from 0 to {items}, got {first} to {last}")
    falls = indptr[1:] < indptr[:-1]
    if np.count_nonzero(falls):
        row = int(falls.argmax())
        raise FrameValueError(f"{name}: expected offsets that never fall, got {indptr[row : row + 2]} at row {row}")


def _check_flags(seen: int, flags: Int32, match: Int32 | None) -> None:
    if seen & ~ROW_MASK:
        raise FrameValueError(f"flags: expected bits of {ROW_MASK:#x}, got {seen:#x}")
    if bool(seen & L.ROW_FINAL) != (match is not None):
        raise FrameSectionError(f"match: expected it if and only if a row is final, got {seen & L.ROW_FINAL} final")
    if not seen & (L.ROW_FINAL | CODE_MASK):
        return
    codes = flags >> L.ROW_CODE_SHIFT
    final = flags & L.ROW_FINAL
    if ((codes != L.FINISH_NONE) != final).any() or codes.max() > LAST_CODE:
        raise FrameValueError(f"flags: expected a finish code from 1 to {LAST_CODE} in final rows, 0 in others")
    if match is not None and match[final == 0].any():
        raise FrameValueError("match: expected 0 in rows that are not final")


def _check_unique(slot: Int32) -> None:
    ordered = np.sort(slot)
    twice = ordered[1:] == ordered[:-1]
    if np.count_nonzero(twice):
        raise FrameValueError(f"slot: expected each at most once, got {ordered[twice.argmax()]} twice")


def _check_lowest(name: str, column: Int32, low: int) -> None:
    lowest = int(np.minimum.reduce(column))
    if lowest < low:
        raise FrameValueError(f"{name}: expected at least {low}, got {lowest}")


def check_columns(frame: Frame, *, known: bool = False) -> int:
    """Check the values of every column and return the flags of all rows, or-ed.

    `known`: slots and generations were found good in an earlier frame. Raises FrameValueError, or
    FrameSectionError for `match`.
    """
    if frame.rows and not known:
        _check_lowest("slot", frame.slot, 0)
        _check_lowest("generation", frame.generation, 1)
    if frame.rows:
        _check_lowest("visible_len", frame.visible_len, 0)
        if not known:
            _check_unique(frame.slot)
    seen = int(np.bitwise_or.reduce(frame.flags))
    _check_flags(seen, frame.flags, frame.match)
    _check_indptr("token_indptr", frame.token_indptr, len(frame.token_ids))
    if seen & L.ROW_HIDDEN_TOKEN:
        hidden = (frame.flags & L.ROW_HIDDEN_TOKEN) != 0
        if (np.diff(frame.token_indptr)[hidden] != 1).any() or frame.visible_len[hidden].any():
            raise FrameValueError("flags: expected one token and visible_len 0 in rows with a hidden token")
    if frame.logprob_indptr is not None and frame.logprobs is not None:
        _check_indptr("logprob_indptr", frame.logprob_indptr, len(frame.logprobs))
    if frame.families_indptr is not None and frame.families is not None:
        _check_indptr("families_indptr", frame.families_indptr, len(frame.families))
    if frame.spec is not None and frame.rows:
        _check_lowest("spec", frame.spec, 0)
    return seen
