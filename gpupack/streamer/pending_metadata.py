"""Kept: host columns of one request that wait for its next row, and what each row takes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gpupack.core.errors import InputError
from gpupack.streamer.frame_room import Room, array_bytes, details_bytes, key_bytes
from gpupack.streamer.metadata_values import (
    checked_array,
    checked_details,
    checked_stats,
    encoded_info,
    encoded_input,
    encoded_state,
)
from gpupack.wire.array import Array
from gpupack.wire.metadata import CachedTokensDetails


@dataclass(slots=True)
class PerToken:
    """Values by output position; `first` is the position of the first that is here, those before it are gone."""

    first: int = 0
    values: list[msgspec.Raw] = field(default_factory=list)
    nbytes: int = 0

    def add(self, values: list[msgspec.Raw]) -> None:
        """Put values of the next positions behind those that are here."""
        self.values += values
        self.nbytes += sum(map(len, values))

    def take(self, start: int, end: int) -> list[msgspec.Raw]:
        """The values of positions [start, end), so far as there are any; those before `end` are forgotten."""
        past = min(max(end - self.first, 0), len(self.values))
        taken = self.values[max(start - self.first, 0) : past]
        self.nbytes -= sum(map(len, self.values[:past]))
        del self.values[:past]
        self.first += past
        return taken

    def take_fitting(self, end: int, room: Room) -> list[msgspec.Raw]:
        """The values of positions before `end`, up to the first for which there is no room."""
        count = 0
        for value in self.values[: max(end - self.first, 0)]:
            if not room.fits(len(value)):
                break
            count += 1
        return self.take(self.first, self.first + count)

    def cut(self, end: int) -> None:
        """Forget positions from `end` on, which are sampled again."""
        keep = max(end - self.first, 0)
        self.nbytes -= sum(map(len, self.values[keep:]))
        del self.values[keep:]


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

    @property
    def nbytes(self) -> int:
        """Most bytes of a side record that all of it takes."""
        info = self.customized_info.items()
        return (
            len(self.input_logprobs or b"")
            + len(self.time_stats or b"")
            + sum(map(array_bytes, self.arrays.values()))
            + details_bytes(self.details)
            + self.hidden_states.nbytes
            + sum(key_bytes(key) + (0 if values is None else values.nbytes) for key, values in info)
        )

    def attach(
        self,
        room: int,
        *,
        hidden_states: Sequence[Any] | None = None,
        customized_info: Mapping[str, Sequence[Any] | None] | None = None,
        input_logprobs: Any = None,
        time_stats: bytes | None = None,
        cached_tokens_details: CachedTokensDetails | None = None,
        **arrays: Any,
    ) -> None:
        """Take in what is not None; InputError, and no change, if any of it cannot travel.

        Nor can what would then wait travel if it is more than `room` bytes, a frame's.
        """
        states = [encoded_state(state) for state in hidden_states or ()]
        info = {key: encoded_info(key, values) for key, values in (customized_info or {}).items()}
        scores = None if input_logprobs is None else encoded_input(input_logprobs)
        scores = None if self.input_logprobs_sent else scores
        details = None if cached_tokens_details is None else checked_details(cached_tokens_details)
        made = {name: checked_array(name, array) for name, array in arrays.items() if array is not None}
        time_stats = checked_stats(time_stats)
        sizes = {name: array_bytes(array) for name, array in made.items()} | {
            "hidden_states": sum(map(len, states)),
            "customized_info": sum(key_bytes(key) + sum(map(len, values or ())) for key, values in info.items()),
            "input_logprobs": len(scores or b""),
            "time_stats": len(time_stats or b""),
            "cached_tokens_details": details_bytes(details),
        }
        self._check_room(sizes, room)
        self.hidden_states.add(states)
        for key, values in info.items():
            here = self.customized_info.setdefault(key, None)
            if values is not None:
                here = self.customized_info[key] = here or PerToken()
                here.add(values)
        if scores is not None:
            self.input_logprobs = scores
        if details is not None and details != self.details:
            self.details, self.details_told = details, False
        self.time_stats = self.time_stats if time_stats is None else time_stats
        self.arrays |= made

    def _check_room(self, sizes: dict[str, int], room: int) -> None:
        """Raise InputError, which names the largest, if something of these sizes is too much for one frame."""
        new = sum(sizes.values())
        waiting = self.nbytes
        if new + waiting <= room:  # nearly always; what is replaced need not be looked at
            return
        replaced = {
            "input_logprobs": len(self.input_logprobs or b""),
            "time_stats": len(self.time_stats or b""),
            "cached_tokens_details": details_bytes(self.details),
        } | {name: array_bytes(array) for name, array in self.arrays.items()}
        waiting -= sum(size for name, size in replaced.items() if sizes.get(name))
        if new + waiting > room:
            name = max(sizes, key=lambda name: sizes[name])
            raise InputError(
                f"{name}: expected at most {room} bytes of one request in a frame, got {new} beside {waiting} that wait"
            )

    def take(
        self, start: int, end: int, room: Room, *, final: bool, scores: bool, whole: bool
    ) -> tuple[dict[str, Any], bool]:
        """Fields of RowExtras for a row of the tokens [start, end), which fit `room`; whether some are lost.

        What the fields say is no longer kept. What does not fit waits for a later row, unless this is the
        final one; values of customized info, which belong to the tokens of their row, are lost at once.
        `scores`: the batch returns logprobs. `whole`: hidden states are all so far, in each row.
        """
        fields: dict[str, Any] = {}
        refused = room.refused
        if self.time_stats is not None and room.fits(len(self.time_stats)):
            fields["time_stats"], self.time_stats = self.time_stats, None
        if not self.details_told and room.fits(details_bytes(self.details)):
            fields["cached_tokens_details"], self.details_told = self.details, True
        lost = self._take_info(fields, start, end, room)
        for name, array in list(self.arrays.items()):
            if room.fits(array_bytes(array)):
                fields[name] = self.arrays.pop(name)
        self._take_states(fields, end if final or not whole else None, room, whole)
        if self.input_logprobs is not None and scores and room.fits(len(self.input_logprobs)):
            fields["input_logprobs"], self.input_logprobs = self.input_logprobs, None
            self.input_logprobs_sent = True
        return fields, lost or (final and room.refused > refused)

    def _take_info(self, fields: dict[str, Any], start: int, end: int, room: Room) -> bool:
        if not self.customized_info:
            return False
        info = {key: values and values.take(start, end) for key, values in self.customized_info.items()}
        size = sum(key_bytes(key) + sum(map(len, values or ())) for key, values in info.items())
        if not room.fits(size):
            return True
        fields["customized_info"] = info
        return False

    def _take_states(self, fields: dict[str, Any], end: int | None, room: Room, whole: bool) -> None:
        if not self.hidden_states.values:
            return
        if not whole:
            assert end is not None
            states = self.hidden_states.take_fitting(end, room)
            if states:
                fields["hidden_states"] = states
            return
        states = self.hidden_states.values[:end]
        if room.fits(sum(map(len, states))):
            fields["hidden_states"], fields["hidden_states_whole"] = states, True

    def waits(self) -> bool:
        """Whether a later row has anything to take."""
        later = self.hidden_states.values or self.customized_info or self.arrays
        return bool(later) or not self.details_told or self.input_logprobs is not None or self.time_stats is not None

    def retracted(self, output_len: int) -> None:
        """What was kept for tokens behind `output_len` is void."""
        self.hidden_states.cut(output_len)
        for values in self.customized_info.values():
            if values is not None:
                values.cut(output_len)

    def dropped(self) -> Kept:
        """The same for a request whose output was dropped."""
        return replace(self, hidden_states=PerToken(), customized_info={}, arrays={})
