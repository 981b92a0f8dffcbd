"""An obvious reader of docs/wire.md, byte by byte and row by row, that shares no code with `gpupack.wire`."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

ROW_BITS = 1 | 2 | 8 | 16  # final, early, opening, restarted
NAMES = (
    "slot", "generation", "flags", "visible_len", "match", "token_indptr", "token_ids", "logprob_indptr", "logprobs",
    "side",
)  # fmt: skip


class RefusedError(Exception):
    """The frame breaks a rule; `args[0]` is the name of the error class that the page gives."""


def need(condition: bool, error: str) -> None:
    if not condition:
        raise RefusedError(error)


def read(data: bytes, max_frame_bytes: int) -> dict[str, Any]:
    """Columns of a frame as lists (logprobs as bit patterns), the side record as plain objects."""
    need(len(data) >= 64, "FrameTruncatedError")
    need(len(data) <= max_frame_bytes, "FrameTooLargeError")
    magic, version, sections, _, _, rank, rows, tokens, logprobs, flags, size, step = struct.unpack_from(
        "<4sHHQQiIIIIIQ", data
    )
    need(magic == b"GPKF", "FrameMagicError")
    need(version == 1, "FrameVersionError")
    need(size == len(data) and size % 8 == 0, "FrameTruncatedError")
    need(flags < 4 and data[56:64] == bytes(8) and not (flags & 1 and rows) and rank >= 0, "FrameValueError")
    need(sections <= 16 and 64 + 16 * sections <= size, "FrameSectionError")
    entries = [struct.unpack_from("<HHIII", data, 64 + 16 * i) for i in range(sections)]
    has_logprobs = bool(flags & 2)
    wanted = [1, 2, 3, 4, 6, 7] + [8, 9] * has_logprobs
    ids = [entry[0] for entry in entries]
    need(ids == sorted(set(wanted) | (set(ids) & {5, 10})), "FrameSectionError")
    end = 64 + 16 * sections
    raw: dict[str, bytes] = {}
    padding = b""
    for number, dtype, offset, count, reserved in entries:
        known = {6: rows + 1, 7: tokens, 8: rows + 1, 9: logprobs, 10: count}.get(number, rows)
        want = (9 - number == 0) * 1 + (number == 10) * 2
        need((dtype, offset, count, reserved) == (want, end, known, 0), "FrameSectionError")
        length = count * (1 if number == 10 else 4)
        need(offset + length <= size and (number != 10 or count > 0), "FrameSectionError")
        raw[NAMES[number - 1]] = data[offset : offset + length]
        end = offset + (length + 7) // 8 * 8
        padding += data[offset + length : end]
    need(end == size and (has_logprobs or logprobs == 0), "FrameSectionError")
    need(not any(padding), "FrameValueError")
    columns: dict[str, Any] = {
        name: list(struct.unpack(f"<{len(part) // 4}{'I' if name == 'logprobs' else 'i'}", part))
        for name, part in raw.items()
        if name != "side"
    }
    check_columns(columns, tokens, logprobs)
    side = read_side(raw["side"], columns["flags"]) if "side" in raw else {}
    check_side(side, columns["flags"])
    return {**columns, "side": side, "dp_rank": rank, "step": step, "idle": bool(flags & 1)}


def check_columns(columns: dict[str, Any], tokens: int, logprobs: int) -> None:
    """The rules of single values."""
    bad = any(slot < 0 for slot in columns["slot"]) or len(set(columns["slot"])) != len(columns["slot"])
    bad |= any(generation < 1 for generation in columns["generation"])
    bad |= any(visible < 0 for visible in columns["visible_len"])
    need(not bad, "FrameValueError")
    need(all(word >= 0 and word & ~(ROW_BITS | 0xFF00) == 0 for word in columns["flags"]), "FrameValueError")
    final = [bool(word & 1) for word in columns["flags"]]
    need(any(final) == ("match" in columns), "FrameSectionError")
    for word in columns["flags"]:
        need(1 <= word >> 8 <= 5 if word & 1 else word >> 8 == 0, "FrameValueError")
    for is_final, match in zip(final, columns.get("match", []), strict=False):
        need(is_final or match == 0, "FrameValueError")
    for name, items in (("token_indptr", tokens), ("logprob_indptr", logprobs)):
        offsets = columns.get(name, [0, items] if items else [0])
        need(offsets[0] == 0 and offsets[-1] == items and offsets == sorted(offsets), "FrameValueError")


def read_side(raw: bytes, flags: list[int]) -> dict[str, Any]:
    """The side record as msgpack's own types, keys and types checked."""
    from gpupack.wire.side import decode_side  # the schema is msgspec's business, not restated here

    try:
        return msgspec.to_builtins(decode_side(raw))
    except Exception as error:
        raise RefusedError(type(error).__name__) from error


def check_side(side: dict[str, Any], flags: list[int]) -> None:
    """The rules that tie the side record to the rows."""
    openings, extras = side.get("openings", []), side.get("extras", [])
    need([o["row"] for o in openings] == [i for i, word in enumerate(flags) if word & 8], "SideRecordError")
    need(not any(o.get("tokens_before", 0) and flags[o["row"]] & 16 for o in openings), "SideRecordError")
    numbers = [e["row"] for e in extras]
    need(numbers == sorted(set(numbers)) and all(n < len(flags) for n in numbers), "SideRecordError")
    reasons = [e["row"] for e in extras if e.get("finish") is not None]
    need(reasons == [i for i, word in enumerate(flags) if word >> 8 in (4, 5)], "SideRecordError")
