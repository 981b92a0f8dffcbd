"""The form of a frame: header, section table, places of the sections, and views of them.

docs/wire.md says it in words. Sections and their order come from `layout.WIRE_SECTIONS`. Nothing
here verifies: `view_frame` trusts its bytes, `wire.decode` is for those of others.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.errors import FrameTooLargeError
from gpupack.wire.metadata import SideRecord, decode_side

MAGIC = b"GPKF"
VERSION = 2
FLAG_IDLE = 1
FLAG_LOGPROBS = 2
MAX_SECTIONS = 16
DEFAULT_MAX_FRAME_BYTES = 64 << 20
LARGEST_FRAME_BYTES = 2**32 - 8  # frame_bytes is a u32

ALIGN = L.WORD * L.ALIGN_WORDS  # bytes
HEADER = struct.Struct("<4sHHQQiIIIIIQIHH")
STAMP = struct.Struct("<QQ")
STAMP_OFFSET = struct.calcsize("<4sHH")
ENTRY = "HHIII"
ENTRY_FIELDS = len(ENTRY)
ENTRY_BYTES = struct.calcsize("<" + ENTRY)
TABLES = [struct.Struct("<" + ENTRY * n) for n in range(MAX_SECTIONS + 1)]
DTYPE_CODES = {"<i4": 0, "<f4": 1, "|u1": 2}

Buffer: TypeAlias = bytes | bytearray | memoryview
Int32: TypeAlias = NDArray[np.int32]


class Header(NamedTuple):
    """The first 64 bytes of a frame."""

    magic: bytes
    version: int
    sections: int
    stream_id: int
    frame_no: int
    dp_rank: int
    rows: int
    tokens: int
    logprobs: int
    flags: int
    frame_bytes: int
    step: int
    families: int
    spec_width: int
    reserved: int


class Shape(NamedTuple):
    """What the places of all sections follow from.

    `logprobs` is None without logprob sections; without `families` or `spec_width` theirs are left out.
    """

    rows: int
    tokens: int
    logprobs: int | None
    match: bool
    side_bytes: int
    families: int = 0
    spec_width: int = 0


class Plan(NamedTuple):
    """Where the sections of a frame lie.

    `entries` is the section table; `words` has (index in WIRE_SECTIONS, first word, end word) of each
    section but the side record, which fills bytes `side[0]` to `side[1]`; `pads` are the words of
    padding behind sections of an odd count; `size` is in bytes.
    """

    entries: tuple[int, ...]
    words: tuple[tuple[int, int, int], ...]
    side: tuple[int, int]
    pads: tuple[int, ...]
    size: int


class Frame(NamedTuple):
    """The columns of one frame, in the order of docs/wire.md.

    `slot`, `generation`, `flags`, `visible_len` and `match` are int32 `[rows]`, the three indptr int32
    `[rows + 1]`, `token_ids` int32 `[tokens]`, `logprobs` float32 `[logprobs]`, `families` int32 words, `spec` int32
    `[spec_width * rows]`, column by column. `match` is None if no row is final, the logprob columns if the batch
    returns none, `families` if there are none, `spec` if nothing is counted, `side` if no row has one.
    Decoded columns are read-only views that keep the received message alive.
    """

    stream_id: int
    frame_no: int
    dp_rank: int
    step: int
    idle: bool
    slot: Int32
    generation: Int32
    flags: Int32
    visible_len: Int32
    match: Int32 | None
    token_indptr: Int32
    token_ids: Int32
    logprob_indptr: Int32 | None
    logprobs: NDArray[np.float32] | None
    families_indptr: Int32 | None = None
    families: Int32 | None = None
    spec: Int32 | None = None
    side: SideRecord | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.slot)

    @property
    def has_logprobs(self) -> bool:
        """Whether the logprob columns are there."""
        return self.logprobs is not None


class KnownRows(NamedTuple):
    """Slots and generations of rows that were verified, int32 `[rows]` each; and both sections as a frame has them."""

    slot: Int32
    generation: Int32
    content: bytes

    @classmethod
    def of(cls, frame: Frame) -> KnownRows:
        """Copies of those of a frame."""
        slot, generation = frame.slot.copy(), frame.generation.copy()
        padding = bytes(-slot.nbytes % ALIGN)
        return cls(slot, generation, slot.tobytes() + padding + generation.tobytes())

    def are_those_of(self, view: memoryview, plan: Plan) -> bool:
        """Whether a frame, whose sections lie as `plan` says, has exactly these rows."""
        _, begin, _ = plan.words[SLOT]
        _, _, end = plan.words[GENERATION]
        return bytes(view[begin * L.WORD : end * L.WORD]) == self.content


assert Frame._fields[-len(L.WIRE_SECTIONS) :] == tuple(L.WIRE_SECTIONS)
MATCH_ID, SIDE_ID = L.WIRE_SECTIONS["match"].id, L.WIRE_SECTIONS["side"].id
INDEX = {name: index for index, name in enumerate(L.WIRE_SECTIONS)}
SLOT, GENERATION = INDEX["slot"], INDEX["generation"]
assert (SLOT, GENERATION) == (0, 1)  # adjacent, and in every frame


def _present(shape: Shape, name: str) -> bool:
    if name == "match":
        return shape.match
    if name in ("families_indptr", "families"):
        return shape.families > 0
    if name == "spec":
        return shape.spec_width > 0
    if name in ("logprob_indptr", "logprobs"):
        return shape.logprobs is not None
    return name != "side" or shape.side_bytes > 0


@lru_cache(maxsize=64)  # step after step has one shape; hostile ones push out no more than that
def plan_frame(shape: Shape) -> Plan:
    """Places of the sections of a frame of this shape; arithmetic only, for any non-negative numbers."""
    counts = {
        "rows": shape.rows,
        "rows+1": shape.rows + 1,
        "tokens": shape.tokens,
        "logprobs": shape.logprobs or 0,
        "families": shape.families,
        "rows*spec_width": shape.rows * shape.spec_width,
        "bytes": shape.side_bytes,
    }
    sections = [(name, section) for name, section in L.WIRE_SECTIONS.items() if _present(shape, name)]
    offset = HEADER.size + ENTRY_BYTES * len(sections)
    entries: list[int] = []
    words, pads, side = [], [], (0, 0)
    for name, section in sections:
        count = counts[section.entries]
        entries += (section.id, DTYPE_CODES[section.dtype], offset, count, 0)
        size = count * np.dtype(section.dtype).itemsize
        end = offset + size
        if name == "side":
            side = (offset, end)
        else:
            words.append((INDEX[name], offset // L.WORD, end // L.WORD))
            if size % ALIGN:
                pads.append(end // L.WORD)
        offset = -(-end // ALIGN) * ALIGN
    return Plan(tuple(entries), tuple(words), side, tuple(pads), offset)


def check_size(size: int, max_frame_bytes: int) -> None:
    """Raise FrameTooLargeError if a frame of `size` bytes is over the maximum."""
    if size > max_frame_bytes:
        raise FrameTooLargeError(f"frame: expected at most {max_frame_bytes} bytes, got {size}")


def write_header(out: memoryview | bytearray, shape: Shape, plan: Plan, *, dp_rank: int, step: int, idle: bool) -> None:
    """Write the header of an unstamped frame (stream id and frame number 0)."""
    sections = len(plan.entries) // ENTRY_FIELDS
    flags = FLAG_IDLE * idle | FLAG_LOGPROBS * (shape.logprobs is not None)
    HEADER.pack_into(
        out, 0, MAGIC, VERSION, sections, 0, 0, dp_rank, shape.rows, shape.tokens, shape.logprobs or 0, flags,
        plan.size, step, shape.families, shape.spec_width, 0,
    )  # fmt: skip


def write_table(out: memoryview | bytearray, plan: Plan) -> None:
    """Write the section table."""
    TABLES[len(plan.entries) // ENTRY_FIELDS].pack_into(out, HEADER.size, *plan.entries)


def stamp(frame: memoryview | bytearray, stream_id: int, frame_no: int) -> None:
    """Write stream id and frame number into a frame, when it is handed to the socket."""
    STAMP.pack_into(frame, STAMP_OFFSET, stream_id, frame_no)


def as_words(view: memoryview) -> Int32:
    """A frame's bytes as int32 words, read-only; copied only if zmq put them at an odd address."""
    words = np.frombuffer(view, np.int32)
    return words if words.flags.aligned else np.frombuffer(bytes(view), np.int32)


def view_columns(words: Int32, header: Header, plan: Plan) -> Frame:
    """The columns of a frame as views of its words; the side record is left out."""
    columns: list[Any] = [None] * len(L.WIRE_SECTIONS)
    for index, start, end in plan.words:
        columns[index] = words[start:end]
    if columns[INDEX["logprobs"]] is not None:
        columns[INDEX["logprobs"]] = columns[INDEX["logprobs"]].view(np.float32)
    idle = bool(header.flags & FLAG_IDLE)
    return Frame(header.stream_id, header.frame_no, header.dp_rank, header.step, idle, *columns)


def table_shape(header: Header, entries: tuple[int, ...]) -> Shape:
    """The shape that header and section table speak of; what they say elsewhere is not looked at."""
    numbers = entries[::ENTRY_FIELDS]
    logprobs = header.logprobs if header.flags & FLAG_LOGPROBS else None
    # The side record has the highest id, so its entry is the last; an entry ends with count and reserved.
    side_count = entries[-2] if numbers and numbers[-1] == SIDE_ID else 0
    return Shape(
        header.rows, header.tokens, logprobs, MATCH_ID in numbers, side_count, header.families, header.spec_width
    )


def view_frame(frame: bytearray) -> Frame:
    """Views of a frame that this process made: nothing is verified, the side record is decoded."""
    view = memoryview(frame).toreadonly()
    header = Header._make(HEADER.unpack_from(view))
    plan = plan_frame(table_shape(header, TABLES[header.sections].unpack_from(view, HEADER.size)))
    columns = view_columns(as_words(view), header, plan)
    side = view[slice(*plan.side)]
    return columns._replace(side=decode_side(side)) if side else columns
