"""An obvious reader of docs/wire.md, byte by byte and row by row, that shares no code with `gpupack.wire`."""

from __future__ import annotations

import struct
from typing import Any

ROW_BITS = 1 | 2 | 8 | 16 | 32  # final, early, opening, restarted, hidden token
NAMES = (
    "slot", "generation", "flags", "visible_len", "match", "token_indptr", "token_ids", "logprob_indptr", "logprobs",
    "families_indptr", "families", "spec", "side",
)  # fmt: skip


class RefusedError(Exception):
    """The frame breaks a rule; `args[0]` is the name of the error class that the page gives."""


def need(condition: bool, error: str) -> None:
    if not condition:
        raise RefusedError(error)


def read(data: bytes, max_frame_bytes: int) -> dict[str, Any]:
    """Columns of a frame as lists (logprobs as bit patterns), and the side record."""
    need(len(data) >= 64, "FrameTruncatedError")
    need(len(data) <= max_frame_bytes, "FrameTooLargeError")
    magic, version, sections, _, _, rank, rows, tokens, logprobs, flags, size, step, words, width, zero = (
        struct.unpack_from("<4sHHQQiIIIIIQIHH", data)
    )
    need(magic == b"GPKF", "FrameMagicError")
    need(version == 2, "FrameVersionError")
    need(size == len(data) and size % 8 == 0, "FrameTruncatedError")
    need(flags < 4 and zero == 0 and not (flags & 1 and rows) and rank >= 0, "FrameValueError")
    need(sections <= 16 and 64 + 16 * sections <= size, "FrameSectionError")
    entries = [struct.unpack_from("<HHIII", data, 64 + 16 * i) for i in range(sections)]
    has_logprobs = bool(flags & 2)
    wanted = [1, 2, 3, 4, 6, 7] + [8, 9] * has_logprobs + [10, 11] * (words > 0) + [12] * (width > 0)
    ids = [entry[0] for entry in entries]
    need(ids == sorted(set(wanted) | (set(ids) & {5, 13})), "FrameSectionError")
    end = 64 + 16 * sections
    raw: dict[str, bytes] = {}
    padding = b""
    for number, dtype, offset, count, reserved in entries:
        known = {6: rows + 1, 7: tokens, 8: rows + 1, 9: logprobs, 10: rows + 1, 11: words, 12: rows * width, 13: count}
        known = known.get(number, rows)
        want = (9 - number == 0) * 1 + (number == 13) * 2
        need((dtype, offset, count, reserved) == (want, end, known, 0), "FrameSectionError")
        length = count * (1 if number == 13 else 4)
        need(offset + length <= size and (number != 13 or count > 0), "FrameSectionError")
        raw[NAMES[number - 1]] = data[offset : offset + length]
        end = offset + (length + 7) // 8 * 8
        padding += data[offset + length : end]
    need(end == size and (has_logprobs or logprobs == 0), "FrameSectionError")
    need((logprobs > 0 or words == 0) and (width == 0 or (width >= 8 and width % 2 == 0)), "FrameSectionError")
    need(not any(padding), "FrameValueError")
    columns: dict[str, Any] = {
        name: list(struct.unpack(f"<{len(part) // 4}{'I' if name == 'logprobs' else 'i'}", part))
        for name, part in raw.items()
        if name != "side"
    }
    check_columns(columns, tokens, logprobs, words)
    side = read_side(raw.get("side", b"\x80"))
    check_side(side, columns["flags"])
    return {**columns, "side": side, "dp_rank": rank, "step": step, "idle": bool(flags & 1)}


def check_columns(columns: dict[str, Any], tokens: int, logprobs: int, words: int) -> None:
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
    for name, items in (("token_indptr", tokens), ("logprob_indptr", logprobs), ("families_indptr", words)):
        offsets = columns.get(name, [0, items] if items else [0])
        need(offsets[0] == 0 and offsets[-1] == items and offsets == sorted(offsets), "FrameValueError")

    for row, word in enumerate(columns["flags"]):
        lengths = columns["token_indptr"][row : row + 2]
        need(not word & 32 or (lengths[1] - lengths[0] == 1 and columns["visible_len"][row] == 0), "FrameValueError")
    need(all(count >= 0 for count in columns.get("spec", [])), "FrameValueError")


def read_side(raw: bytes) -> Any:
    """The side record, keys and types checked."""
    from gpupack.wire.metadata import decode_side  # the schema is msgspec's business, not restated here

    try:
        return decode_side(raw)
    except Exception as error:
        raise RefusedError(type(error).__name__) from error


def check_side(side: Any, flags: list[int]) -> None:
    """The rules that tie the side record to the rows, and its values to each other."""
    need([o.row for o in side.openings] == [i for i, word in enumerate(flags) if word & 8], "SideRecordError")
    need(not any(o.tokens_before and flags[o.row] & 16 for o in side.openings), "SideRecordError")
    numbers = [e.row for e in side.extras]
    need(numbers == sorted(set(numbers)) and all(n < len(flags) for n in numbers), "SideRecordError")
    reasons = [e.row for e in side.extras if e.finish is not None]
    need(reasons == [i for i, word in enumerate(flags) if word >> 8 in (4, 5)], "SideRecordError")
    need(len(side.returned) == len(set(side.returned)), "SideRecordError")
    for whole in (side.embeddings, side.pooled_hidden_states):
        check_array(whole)
        need(whole is None or whole.shape[:1] == [len(flags)], "SideRecordError")
    for extra in side.extras:
        need(extra.hidden_states is not None or not extra.hidden_states_whole, "SideRecordError")
        arrays = [state for state in extra.hidden_states or [] if hasattr(state, "shape")]
        for array in (*arrays, extra.routed_experts, extra.indexer_topk, extra.pooled_hidden_state):
            check_array(array)
        if extra.input_logprobs is not None:
            check_input_logprobs(extra.input_logprobs)


ITEM_BYTES = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4,
              "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8}  # fmt: skip


def check_array(array: Any) -> None:
    """A known type, and as many bytes as it has items."""
    if array is None:
        return
    need(array.dtype in ITEM_BYTES, "SideRecordError")
    items, most = 1, 1
    for size in array.shape:
        items, most = items * size, most * max(size, 1)
    need(most < 2**31 and items * ITEM_BYTES[array.dtype] == len(array.data), "SideRecordError")


def check_input_logprobs(logprobs: Any) -> None:
    """Values and ids in equal numbers, of each kind and, where a position has several, of each position."""
    for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        values, ids = getattr(logprobs, kind + "_val"), getattr(logprobs, kind + "_idx")
        need((values is None) == (ids is None) and len(values or []) == len(ids or []), "SideRecordError")
        if kind != "token_logprobs":
            for some, others in zip(values or [], ids or [], strict=True):
                need((some is None) == (others is None) and len(some or []) == len(others or []), "SideRecordError")
