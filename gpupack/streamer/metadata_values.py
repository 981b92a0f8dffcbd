"""Values of host columns as msgpack, refused here if the receiver would refuse them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gpupack.core.errors import InputError, SideRecordError
from gpupack.wire.array import Array
from gpupack.wire.metadata import MAX_TIME_STATS, CachedTokensDetails, InputLogprobs, no_extension
from gpupack.wire.verify_metadata import check_input_logprobs

PLAIN = (int, float, str, bool, type(None))  # what is encoded of these can always be read
DEEPER = b"\x91" * 32  # a value lies deep inside a side record: as many arrays around it, and more

# What goes wrong when a value cannot be encoded, or be read again; RuntimeError: tensors without items.
CANNOT = (TypeError, ValueError, OverflowError, RuntimeError, msgspec.MsgspecError)

_input_logprobs = msgspec.msgpack.Decoder(InputLogprobs)
_details = msgspec.msgpack.Decoder(CachedTokensDetails)
_array = msgspec.msgpack.Decoder(Array)
_values = msgspec.msgpack.Decoder(ext_hook=no_extension)


def _builtin(value: Any) -> Any:
    """What msgspec asks for: NumPy arrays and scalars and torch tensors as lists and numbers."""
    device = str(getattr(value, "device", "cpu"))
    if device.split(":")[0] != "cpu":  # its copy would be a hidden synchronisation
        raise TypeError(f"expected a tensor on the CPU, got one on {device}")
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"no form on the wire for {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_builtin)


def _encoded(name: str, value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except CANNOT as error:
        raise _cannot(name, error) from None


def _cannot(name: str, error: Exception) -> InputError:
    return InputError(f"{name}: expected a value that msgpack can carry, got one that it cannot: {error}")


def encoded(name: str, value: Any) -> msgspec.Raw:
    """The msgpack of a value, so that one that cannot travel is refused here and later changes do not matter.

    InputError names what was wrong: no form in msgpack, an extension, nested too deep, a tensor on a device.
    """
    raw = _encoded(name, value)
    if type(value) not in PLAIN:
        try:
            _values.decode(DEEPER + raw)
        except CANNOT as error:
            raise _cannot(name, error) from None
    return msgspec.Raw(raw)


def encoded_state(state: Any) -> msgspec.Raw:
    """The msgpack of one hidden state: an array or tensor as `Array`, a list or number as it is."""
    if hasattr(state, "tolist"):
        return msgspec.Raw(_encoded("hidden_states", checked_array("hidden_states", state)))
    if isinstance(state, bool) or not isinstance(state, (list, tuple, int, float, type(None))):
        raise InputError(f"hidden_states: expected arrays, lists or numbers, got {type(state).__name__}")
    return encoded("hidden_states", state)


def encoded_input(logprobs: Any) -> msgspec.Raw:
    """The msgpack of InputLogprobs; InputError if types or lengths are not right."""
    raw = _encoded("input_logprobs", logprobs)
    try:
        check_input_logprobs(_input_logprobs.decode(raw))
    except (*CANNOT, SideRecordError) as error:
        raise InputError(f"input_logprobs: expected InputLogprobs, got {error}") from None
    return msgspec.Raw(raw)


def encoded_info(key: Any, values: Sequence[Any] | None) -> list[msgspec.Raw] | None:
    """The msgpack of the values of a key of customized info; InputError if key or values cannot travel."""
    if not isinstance(key, str):
        raise InputError(f"customized_info: expected keys that are strings, got {key!r}")
    _encoded("customized_info", key)
    return None if values is None else [encoded(f"customized_info[{key!r}]", value) for value in values]


def checked_array(name: str, value: Any) -> Array:
    """A copy of an array or CPU tensor; an `Array` as it is, if its dtype, shape and bytes fit. InputError."""
    array = Array.of(value)
    if array is value:
        try:
            _array.decode(_encoded(name, array))
            array.check(name)
        except (*CANNOT, SideRecordError) as error:
            raise InputError(f"{name}: expected an array, got {error}") from None
    return array


def checked_details(details: Any) -> CachedTokensDetails:
    """Cached-token details that can travel, a copy; else InputError."""
    try:
        return _details.decode(_encoded("cached_tokens_details", details))
    except CANNOT as error:
        raise InputError(f"cached_tokens_details: expected names with counts or texts, got {error}") from None


def checked_stats(stats: Any) -> bytes | None:
    """Time stats that can travel; else InputError."""
    if not isinstance(stats, (bytes, type(None))):
        raise InputError(f"time_stats: expected bytes, got {type(stats).__name__}")
    if stats is not None and len(stats) > MAX_TIME_STATS:
        raise InputError(f"time_stats: expected at most {MAX_TIME_STATS} bytes, got {len(stats)}")
    return stats
