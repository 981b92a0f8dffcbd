"""Kept: host columns of one request that wait for its next row, and what each row takes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gpupack.errors import InputError, SideRecordError
from gpupack.wire.array import Array
from gpupack.wire.side import CachedTokensDetails, InputLogprobs
from gpupack.wire.verify_side import check_input_logprobs

DEEP = 256  # bytes from which an encoded value may be nested too deep for the receiver

_input_logprobs = msgspec.msgpack.Decoder(InputLogprobs)
_details = msgspec.msgpack.Decoder(CachedTokensDetails)


def _builtin(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy arrays and scalars, torch tensors
        return value.tolist()
    raise TypeError(f"no form on the wire for {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_builtin)


def encoded(name: str, value: Any) -> msgspec.Raw:
    """The msgpack of a value, so that one that cannot travel is refused here and later changes do not matter.

    InputError names what was wrong.
    """
    try:
        raw = _encoder.encode(value)
        if len(raw) >= DEEP:
            msgspec.msgpack.decode(b"\x91" * 32 + raw)  # as deep inside a side record, and deeper
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InputError(f"{name}: expected a value that msgpack can carry, got one that it cannot: {error}") from None
    return msgspec.Raw(raw)


def encoded_state(state: Any) -> msgspec.Raw:
    """The msgpack of one hidden state: an array or tensor as `Array`, a list or number as it is."""
    if hasattr(state, "tolist"):
        state = Array.of(state)
    elif not isinstance(state, (list, tuple, int, float, type(None))):
        raise InputError(f"hidden_states: expected arrays, lists or numbers, got {type(state).__name__}")
    return encoded("hidden_states", state)


def encoded_input(logprobs: Any) -> msgspec.Raw:
    """The msgpack of InputLogprobs; InputError if types or lengths are not right."""
    raw = encoded("input_logprobs", logprobs)
    try:
        check_input_logprobs(_input_logprobs.decode(raw))
    except (msgspec.MsgspecError, SideRecordError) as error:
        raise InputError(f"input_logprobs: expected InputLogprobs, got {error}") from None
    return raw


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise InputError(f"customized_info: expected keys that are strings, got {key!r}")
    encoded("customized_info", key)
    return key


def _values(key: str, values: Sequence[Any] | None) -> list[msgspec.Raw] | None:
    return None if values is None else [encoded(f"customized_info[{key!r}]", value) for value in values]


def checked_details(details: Any) -> CachedTokensDetails:
    """Cached-token details that can travel, a copy; else InputError."""
    try:
        return _details.decode(encoded("cached_tokens_details", details))
    except msgspec.MsgspecError as error:
        raise InputError(f"cached_tokens_details: expected names with counts or texts, got {error}") from None


@dataclass(slots=True)
class PerToken:
    """Values by output position; `first` is the position of the first that is here, those before it are gone."""

    first: int = 0
    values: list[msgspec.Raw] = field(default_factory=list)

    def take(self, start: int, end: int) -> list[msgspec.Raw]:
        """The values of positions [start, end), so far as there are any; those before `end` are forgotten."""
        past = min(max(end - self.first, 0), len(self.values))
        taken = self.values[max(start - self.first, 0) : past]
        del self.values[:past]
        self.first += past
        return taken

    def cut(self, end: int) -> None:
        """Forget positions from `end` on, which are sampled again."""
        del self.values[max(end - self.first, 0) :]


@dataclass(slots=True)
class Kept:
    """What waits for the next row of one request; it goes with the request through a retraction.

    `counts` is set while the request has no slot: the newest counts, in the order of `side.COUNTS`.
    """

    input_logprobs: msgspec.Raw | None = None
    input_logprobs_sent: bool = False
    time_stats: bytes | None = None
    arrays: dict[str, Array] = field(default_factory=dict)  # routed_experts, indexer_topk
    details: CachedTokensDetails | None = None
    details_told: bool = True
    hidden_states: PerToken = field(default_factory=PerToken)
    customized_info: dict[str, PerToken | None] = field(default_factory=dict)
    counts: tuple[int, ...] = ()

    def attach(
        self,
        *,
        hidden_states: Sequence[Any] | None = None,
        customized_info: Mapping[str, Sequence[Any] | None] | None = None,
        input_logprobs: Any = None,
        time_stats: bytes | None = None,
        cached_tokens_details: CachedTokensDetails | None = None,
        **arrays: Any,
    ) -> None:
        """Take in what is not None; InputError, and no change, if any of it cannot travel."""
        states = [encoded_state(state) for state in hidden_states or ()]
        info = {_key(key): _values(key, values) for key, values in (customized_info or {}).items()}
        scores = None if input_logprobs is None else encoded_input(input_logprobs)
        details = None if cached_tokens_details is None else checked_details(cached_tokens_details)
        made = {name: Array.of(array) for name, array in arrays.items() if array is not None}
        if not isinstance(time_stats, (bytes, type(None))):
            raise InputError(f"time_stats: expected bytes, got {type(time_stats).__name__}")
        self.hidden_states.values += states
        for key, values in info.items():
            here = self.customized_info.setdefault(key, None)
            if values is not None:
                here = self.customized_info[key] = here or PerToken()
                here.values += values
        if scores is not None and not self.input_logprobs_sent:
            self.input_logprobs = scores
        if details is not None and details != self.details:
            self.details, self.details_told = details, False
        self.time_stats = self.time_stats if time_stats is None else time_stats
        self.arrays |= made

    def take(self, start: int, end: int, *, final: bool, scores: bool, whole: bool) -> dict[str, Any]:
        """Fields of RowExtras for a row of the tokens [start, end); what they say is no longer kept.

        `scores`: the batch returns logprobs. `whole`: hidden states are all so far, in each row.
        """
        fields: dict[str, Any] = dict(self.arrays)
        self.arrays = {}
        if self.input_logprobs is not None and scores:
            fields["input_logprobs"], self.input_logprobs = self.input_logprobs, None
            self.input_logprobs_sent = True
        if self.time_stats is not None:
            fields["time_stats"], self.time_stats = self.time_stats, None
        if not self.details_told:
            fields["cached_tokens_details"], self.details_told = self.details, True
        if whole and self.hidden_states.values:
            fields["hidden_states"] = self.hidden_states.values[: end if final else None]
            fields["hidden_states_whole"] = True
        elif self.hidden_states.values:
            states = self.hidden_states.take(self.hidden_states.first, end)
            if states:
                fields["hidden_states"] = states
        info = {key: values and values.take(start, end) for key, values in self.customized_info.items()}
        if info:
            fields["customized_info"] = info
        return fields

    def waits(self) -> bool:
        """Whether a later row has anything to take."""
        later = self.hidden_states.values or self.customized_info or self.input_logprobs is not None
        return bool(later) or not self.details_told

    def retracted(self, output_len: int) -> None:
        """What was kept for tokens behind `output_len` is void."""
        self.hidden_states.cut(output_len)
        for values in self.customized_info.values():
            if values is not None:
                values.cut(output_len)

    def dropped(self) -> Kept:
        """The same for a request whose output was dropped."""
        return replace(self, hidden_states=PerToken(), customized_info={}, arrays={})
