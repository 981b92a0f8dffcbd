"""Joining the side records of frames that wait for a slow receiver (docs/wire.md, "A slow receiver")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.wire.frame import Frame
from gpupack.wire.metadata import OpeningRecord, Returned, RowExtras, SideRecord

Index = NDArray[np.intp]
Info = dict[str, list[Any] | None]


def join_sides(frames: Sequence[Frame], target: Index) -> SideRecord | None:
    """The side records as one, rows renumbered: source row i joins row `target[i]`.

    Openings stay as they are; what extras of one row become, `_joined` says. Frames with arrays for all
    their rows are not joined.
    """
    openings: list[OpeningRecord] = []
    ended: list[int] = []
    dropped: list[int] = []
    returned: list[Returned] = []
    extras: dict[int, RowExtras] = {}
    lengths = _TokensBefore(frames, target)
    base = 0
    for number, frame in enumerate(frames):
        if frame.side is not None:
            for opening in frame.side.openings:
                openings.append(msgspec.structs.replace(opening, row=int(target[base + opening.row])))
            for extra in frame.side.extras:
                row = int(target[base + extra.row])
                before = lengths.of(number, row) if extra.customized_info else 0
                extras[row] = _joined(extras.get(row), msgspec.structs.replace(extra, row=row), before)
            ended += frame.side.ended
            dropped += frame.side.dropped
            returned += [name for name in frame.side.returned if name not in returned]
        base += frame.rows
    if not (openings or extras or ended or dropped or returned):
        return None
    # A row that opens is the first of its handle, so the openings come in the order of their rows.
    rising = [extras[row] for row in sorted(extras)]
    return SideRecord(openings=openings, extras=rising, ended=ended, dropped=dropped, returned=returned)


class _TokensBefore:
    """How many tokens of a row come from earlier frames; counted when it is first asked for."""

    def __init__(self, frames: Sequence[Frame], target: Index) -> None:
        self._frames = frames
        self._target = target
        self._counts: list[NDArray[np.int64]] = []  # by frame, of each joined row

    def of(self, number: int, row: int) -> int:
        """Tokens of `row` from frames before frame `number`."""
        if not self._counts:
            counts = np.zeros(int(self._target.max()) + 1, np.int64)
            base = 0
            for frame in self._frames:
                self._counts.append(counts.copy())
                counts[self._target[base : base + frame.rows]] += np.diff(frame.token_indptr)
                base += frame.rows
        return int(self._counts[number][row])


def _joined(old: RowExtras | None, new: RowExtras, tokens_before: int) -> RowExtras:
    """The extras of two rows of one request as those of one row.

    Input logprobs stay those of the first; hidden states and customized info join, unless all hidden
    states so far replace them; of everything else the newest counts.
    """
    info = None
    if new.customized_info is not None or (old is not None and old.customized_info is not None):
        earlier = None if old is None else old.customized_info
        info = _join_info(earlier or {}, new.customized_info or {}, tokens_before)
    if old is None:
        return new if info is None else msgspec.structs.replace(new, customized_info=info)
    pairs = zip(msgspec.structs.astuple(old), msgspec.structs.astuple(new), strict=True)
    newest = RowExtras(*(before if after is None else after for before, after in pairs))
    states, whole = old.hidden_states, old.hidden_states_whole
    if new.hidden_states is not None:
        states, whole = [*(states or ()), *new.hidden_states], whole
        if new.hidden_states_whole:
            states, whole = new.hidden_states, True
    return msgspec.structs.replace(
        newest,
        input_logprobs=new.input_logprobs if old.input_logprobs is None else old.input_logprobs,
        hidden_states=states,
        hidden_states_whole=whole,
        customized_info=info,
        counts=None if old.counts is None and new.counts is None else {**(old.counts or {}), **(new.counts or {})},
    )


def _join_info(old: Info, new: Info, tokens_before: int) -> Info:
    """Customized info by key; none per token of a part that lacks the key, so that values stay at their tokens."""
    joined: Info = dict(old)
    for key, values in new.items():
        earlier = old.get(key)
        if values is None and earlier is None:
            joined[key] = None
            continue
        known = list(earlier or ())
        if values:
            known += [None] * (tokens_before - len(known))
        joined[key] = known + list(values or ())
    return joined


def side_growth(frame: Frame) -> int:
    """Most bytes by which the side record of a frame grows where it is joined: row numbers, headers of arrays."""
    if frame.side is None:
        return 0
    side = frame.side
    records = len(side.openings) + len(side.extras) + len(side.ended) + len(side.dropped) + len(side.returned)
    lists = sum(1 + len(extra.customized_info or ()) for extra in side.extras)
    return 2 * L.WORD * (records + lists + 2)


def info_keys(frame: Frame) -> set[str]:
    """Keys of customized info in a frame."""
    return set() if frame.side is None else {key for e in frame.side.extras for key in e.customized_info or ()}
