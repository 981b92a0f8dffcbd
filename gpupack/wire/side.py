"""The side record: what a frame carries beside its columns, as msgpack (docs/wire.md)."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from gpupack import layout as L
from gpupack.errors import SideRecordError

INT32_MAX = 2**31 - 1

FinishReason: TypeAlias = dict[str, str | int | float | bool | None]

RowIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
PromptTail: TypeAlias = Annotated[list[TokenId], msgspec.Meta(max_length=5)]
Handle: TypeAlias = Annotated[int, msgspec.Meta(ge=1 << L.SLOT_BITS, le=2**63 - 1)]

FINISH_IN_EXTRAS = (L.FINISH_STOP_STRING, L.FINISH_HOST)  # codes whose reason travels in the side record


class OpeningRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is sent once of a request, with its first row.

    `row` is the row of its frame. `prompt_tail` holds at most 5 token ids, its length is the read
    offset. `tokens_before` counts tokens sent before this row; `resumed` says that a row of the request
    was sent before, under another handle or on an earlier stream; `restarts` counts how often its output
    was dropped so far.
    """

    row: RowIndex
    rid: str
    worker: str | None = None
    decoded_text: str = ""
    prompt_tail: PromptTail = []
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    tokens_before: Count = 0
    resumed: bool = False
    restarts: Count = 0


class RowExtras(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What row `row` has beside its columns; None: nothing of that kind."""

    row: RowIndex
    finish: FinishReason | None = None


class SideRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Opening records and extras by rising row, and handles that ended without a final row.

    A request of `ended` may come back, one of `dropped` will not.
    """

    openings: list[OpeningRecord] = []
    extras: list[RowExtras] = []
    ended: list[Handle] = []
    dropped: list[Handle] = []


_EMPTY = SideRecord()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SideRecord)


def encode_side(side: SideRecord | None) -> bytes:
    """The msgpack bytes of a side record; no bytes for None or an empty one, which is not sent."""
    if side is None or side == _EMPTY:
        return b""
    return _encoder.encode(side)


def decode_side(data: bytes | memoryview) -> SideRecord:
    """Read a side record; types, ranges and keys are checked, not yet the rows it names.

    Raises SideRecordError for anything that is not the msgpack of a SideRecord.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SideRecordError(f"side record: expected msgpack of a SideRecord, got: {error}") from error


def finish_reason(code: int, match: int, finish: FinishReason | None) -> FinishReason | None:
    """The finish reason of a row from its finish code, `match` and the `finish` of its extras.

    None for FINISH_NONE. Codes of `FINISH_IN_EXTRAS` take `finish` as it is.
    """
    if code == L.FINISH_NONE:
        return None
    if code == L.FINISH_STOP_TOKEN:
        return {"type": "stop", "matched": match}
    if code == L.FINISH_LENGTH:
        return {"type": "length", "length": match}
    if code == L.FINISH_INVALID_TOKEN:
        message = f"The model sampled token id {match}, which is outside the vocabulary."
        return {"type": "abort", "message": message, "status_code": 500, "err_type": "InvalidTokenError"}
    return finish
