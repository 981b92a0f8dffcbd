"""The side record: what a frame carries beside its columns, as msgpack (docs/wire.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn, TypeAlias, get_args

import msgspec

from gpupack.core import layout as L
from gpupack.core.config import MAX_FAMILY
from gpupack.core.errors import SideRecordError
from gpupack.core.request import MAX_NAME
from gpupack.wire.array import INT32_MAX, Array

__all__ = [
    "COUNTS",
    "FINISH_IN_EXTRAS",
    "INT32_MAX",
    "MAX_TIME_STATS",
    "RETURNED",
    "Array",
    "CachedTokensDetails",
    "Embedding",
    "FinishReason",
    "InputLogprobs",
    "OpeningRecord",
    "RowExtras",
    "SideRecord",
    "decode_side",
    "encode_side",
    "finish_reason",
    "no_extension",
]

MAX_TIME_STATS = 1 << 20  # bytes

FinishReason: TypeAlias = dict[str, str | int | float | bool | None]

RowIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
CountName: TypeAlias = Literal[
    "cached_tokens", "reasoning_tokens", "retraction_counts", "image_tokens", "audio_tokens", "video_tokens"
]
CachedTokensDetails: TypeAlias = dict[str, int | str]
HiddenState: TypeAlias = Array | list[Any] | int | float | None  # of one output token; the first may hold the prompt's
# Of one request: dense, of one vector or of several; sparse, by index; a single score.
Embedding: TypeAlias = float | int | list[float | int | list[float | int]] | dict[RowIndex, float | int]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
ScoredIds: TypeAlias = Annotated[list[TokenId], msgspec.Meta(max_length=MAX_FAMILY)]
TimeStats: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_TIME_STATS)]
PromptTail: TypeAlias = Annotated[list[TokenId], msgspec.Meta(max_length=5)]
Handle: TypeAlias = Annotated[int, msgspec.Meta(ge=1 << L.SLOT_BITS, le=2**63 - 1)]

Returned: TypeAlias = Literal["hidden_states", "routed_experts", "indexer_topk"]

COUNTS: tuple[CountName, ...] = get_args(CountName)
RETURNED: tuple[Returned, ...] = get_args(Returned)
FINISH_IN_EXTRAS = (L.FINISH_STOP_STRING, L.FINISH_HOST)  # codes whose reason travels in the side record


class InputLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Logprobs of the prompt's tokens, once a request: SPEC.md section 3's six `input_…` columns, in their own form."""

    token_logprobs_val: list[float | None] | None = None
    token_logprobs_idx: list[int | None] | None = None
    top_logprobs_val: list[list[float] | None] | None = None
    top_logprobs_idx: list[list[int] | None] | None = None
    token_ids_logprobs_val: list[list[float] | None] | None = None
    token_ids_logprobs_idx: list[list[int] | None] | None = None


class OpeningRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is sent once of a request, with its first row.

    `row` is the row of its frame. `prompt_tail` holds at most 5 token ids, its length is the read
    offset. `tokens_before` counts tokens sent before this row; `resumed` says that a row of the request
    was sent before, under another handle or on an earlier stream; `restarts` counts how often its output
    was dropped so far. Counts and `cached_tokens_details` are those of this row; later rows bring new
    values in their extras.
    """

    row: RowIndex
    rid: Name
    worker: Name | None = None
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
    return_logprob: bool = False
    top_logprobs_num: Count = 0
    token_ids_logprob: ScoredIds = []
    return_hidden_states: bool = False
    reasoning_tokens: Count = 0
    retraction_counts: Count = 0
    image_tokens: Count = 0
    audio_tokens: Count = 0
    video_tokens: Count = 0
    cached_tokens_details: CachedTokensDetails | None = None

    @property
    def family_width(self) -> int:
        """Words of a position's record in the family section."""
        return 2 * self.top_logprobs_num + len(self.token_ids_logprob)


class RowExtras(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What row `row` has beside its columns; None: nothing of that kind."""

    row: RowIndex
    finish: FinishReason | None = None
    input_logprobs: InputLogprobs | None = None
    hidden_states: list[HiddenState] | None = None  # entries of the request's list: new ones, or all so far
    hidden_states_whole: bool = False  # all so far: they replace what came before
    routed_experts: Array | None = None
    indexer_topk: Array | None = None
    customized_info: dict[str, list[Any] | None] | None = None  # by key, the values of the delta's tokens
    time_stats: TimeStats | None = None  # opaque: encoded by the scheduler, never looked at here
    cached_tokens_details: CachedTokensDetails | None = None
    counts: dict[CountName, Count] | None = None  # newest values of those that changed
    embedding: Embedding | None = None  # where the frame has no `embeddings`
    pooled_hidden_state: Array | None = None


class SideRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Opening records and extras by rising row, and handles that ended without a final row.

    A request of `ended` may come back, one of `dropped` will not. `returned` names the columns that a
    request of the batch asked for, whether or not it has a row.
    """

    openings: list[OpeningRecord] = []
    extras: list[RowExtras] = []
    ended: list[Handle] = []
    dropped: list[Handle] = []
    returned: list[Returned] = []
    embeddings: Array | None = None  # [rows, D], of an embedding frame
    pooled_hidden_states: Array | None = None  # [rows, …], stacked


_EMPTY = SideRecord()
_encoder = msgspec.msgpack.Encoder()


def no_extension(code: int, data: memoryview) -> NoReturn:
    """The hook of every decoder of side records: ValueError, which says that extensions do not travel."""
    raise ValueError(f"expected plain values, got a msgpack extension of code {code}")


_decoder = msgspec.msgpack.Decoder(SideRecord, ext_hook=no_extension)


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
    # TypeError, ValueError: a map with keys that no dict takes, an extension, a timestamp out of range.
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
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
