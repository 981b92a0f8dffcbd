"""Random lives of a sender: the frames that it would send, and what they say about each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from frames import Row, Step, frame_of
from hypothesis import strategies as st

from gpupack.core import layout as L
from gpupack.wire.frame import Frame
from gpupack.wire.metadata import FINISH_IN_EXTRAS, OpeningRecord, RowExtras, SideRecord, finish_reason

SLOTS = 5
KINDS = ["tokens"] * 4 + ["open", "open", "finish", "cut", "retract", "resume", "resume", "restart", "drop"]

# One step: acts of (kind, whom or where, how much); a pick is taken modulo what is there.
acts = st.tuples(st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 3))
lives = st.lists(st.tuples(st.lists(acts, max_size=5), st.booleans()), min_size=1, max_size=40)


@dataclass
class Sent:
    """A request as the sender knows it."""

    rid: str
    slot: int = -1
    generation: int = 0
    sent: int = 0
    opened: bool = False
    restarts: int = 0


@dataclass
class Sender:
    """Plays acts; `frames` is what it sends, one a step that has something to say."""

    frames: list[Frame] = field(default_factory=list)
    live: list[Sent] = field(default_factory=list)
    suspended: list[Sent] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    generations: list[int] = field(default_factory=lambda: [0] * SLOTS)
    token: int = 0

    def play(self, life: Sequence[tuple[list[tuple[str, int, int]], bool]]) -> list[Frame]:
        """All steps of a life."""
        for number, (step_acts, has_logprobs) in enumerate(life):
            self._rows: list[Row] = []
            self._openings: list[OpeningRecord] = []
            self._ended: list[int] = []
            self._dropped: list[int] = []
            for kind, pick, amount in step_acts:
                getattr(self, f"_{kind}")(pick, amount)
            self._emit(number, has_logprobs)
        return self.frames

    def _emit(self, number: int, has_logprobs: bool) -> None:
        if not (self._rows or self._ended or self._dropped) and number % 3:
            return
        extras = [
            RowExtras(row=i, finish={"type": "abort", "message": str(row.slot)})
            for i, row in enumerate(self._rows)
            if row.code in FINISH_IN_EXTRAS
        ]
        side = SideRecord(self._openings, extras, self._ended, self._dropped)
        if has_logprobs:
            for row in self._rows:
                row.logprobs = [-float(token) for token in row.tokens] if row.slot % 2 else None
        empty = side == SideRecord()
        step = Step(self._rows, has_logprobs, number, idle=not self._rows, side=None if empty else side)
        self.frames.append(frame_of(step))

    def _pick(self, pick: int) -> Sent | None:
        """A live request without a row in this step."""
        taken = {row.slot for row in self._rows}
        free = [request for request in self.live if request.slot not in taken]
        return free[pick % len(free)] if free else None

    def _take_slot(self, pick: int) -> int | None:
        taken = {row.slot for row in self._rows} | {request.slot for request in self.live}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        return free[pick % len(free)] if free else None

    def _row(self, request: Sent, amount: int, **more: Any) -> Row:
        tokens = list(range(self.token, self.token + amount))
        self.token += amount
        request.sent += amount
        more.setdefault("visible_len", request.sent)
        row = Row(request.slot, request.generation, tokens, **more)
        self._rows.append(row)
        return row

    def _begin(self, request: Sent, slot: int, amount: int, flags: int = 0) -> None:
        self.generations[slot] += 1
        request.slot, request.generation = slot, self.generations[slot]
        self._openings.append(
            OpeningRecord(
                row=len(self._rows), rid=request.rid, prompt_tokens=slot, tokens_before=request.sent,
                resumed=request.opened, restarts=request.restarts,
            )
        )  # fmt: skip
        self._row(request, amount, flags=L.ROW_OPENING | flags)
        request.opened = True
        self.live.append(request)

    def _open(self, pick: int, amount: int) -> None:
        slot = self._take_slot(pick)
        if slot is not None:
            reuse = bool(self.finished) and pick % 3 == 0
            self._begin(
                Sent(self.finished.pop() if reuse else f"r{self.token}.{len(self.frames)}.{slot}"), slot, amount
            )

    def _tokens(self, pick: int, amount: int) -> None:
        request = self._pick(pick)
        if request is not None:
            self._row(request, amount)

    def _finish(self, pick: int, amount: int) -> None:
        request = self._pick(pick)
        if request is not None:
            self._row(request, amount, flags=L.ROW_FINAL, code=1 + pick % 5, match=amount)
            self._end(request)

    def _cut(self, pick: int, amount: int) -> None:
        request = self._pick(pick)
        if request is not None:
            visible = max(0, request.sent - amount)
            self._row(request, 0, flags=L.ROW_FINAL, code=L.FINISH_STOP_TOKEN, match=amount, visible_len=visible)
            self._end(request)

    def _end(self, request: Sent) -> None:
        self.live.remove(request)
        self.finished.append(request.rid)

    def _retract(self, pick: int, amount: int) -> None:
        if self.live:
            request = self.live.pop(pick % len(self.live))
            self._ended.append(request.generation << L.SLOT_BITS | request.slot)
            self.suspended.append(request)

    def _drop(self, pick: int, amount: int) -> None:
        if self.live:
            request = self.live.pop(pick % len(self.live))
            self._dropped.append(request.generation << L.SLOT_BITS | request.slot)
            self.finished.append(request.rid)

    def _resume(self, pick: int, amount: int, restart: bool = False) -> None:
        slot = self._take_slot(pick)
        # Not in a frame that still has a row of the old handle.
        taken = {(row.slot, row.generation) for row in self._rows}
        ready = [request for request in self.suspended if (request.slot, request.generation) not in taken]
        if slot is not None and ready:
            request = ready[pick % len(ready)]
            self.suspended.remove(request)
            request.sent = 0 if restart else request.sent
            request.restarts += restart
            self._begin(request, slot, amount, L.ROW_RESTARTED if restart else 0)

    def _restart(self, pick: int, amount: int) -> None:
        self._resume(pick, amount, restart=True)


@dataclass
class Life:
    """What became of one request: everything that its deltas said."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    finish_reason: Any = None
    ended: bool = False


class Fold:
    """Joins deltas into lives by rid, a rid that opens anew after the other."""

    def __init__(self) -> None:
        self.lives: dict[str, list[Life]] = {}

    def push(self, delta: Any) -> None:
        """Take in one delta (gpupack's own, or a `Told`)."""
        if delta.opening is not None and not delta.opening.resumed:
            self.drop(delta.rid)  # whoever reads the deltas takes it as the end of the one before
            self.lives.setdefault(delta.rid, []).append(Life(delta.opening.prompt_tokens))
        life = self.lives[delta.rid][-1]
        assert not life.ended
        if delta.restarted:
            life.token_ids, life.logprobs = [], []
        life.token_ids += delta.token_ids
        life.logprobs += delta.logprobs or []
        life.completion_tokens = delta.completion_tokens
        life.finish_reason = delta.finish_reason
        life.ended = delta.finish_reason is not None

    def drop(self, rid: str) -> None:
        """No more comes of a rid."""
        for life in self.lives.get(rid, [])[-1:]:
            life.ended = True


@dataclass
class Told:
    """A delta as the obvious reader has it."""

    rid: str
    token_ids: list[int]
    logprobs: list[float]
    completion_tokens: int
    finish_reason: Any
    restarted: bool
    opening: OpeningRecord | None


def told(frames: Iterable[Frame]) -> Fold:
    """The obvious receiver: row by row, a dict of handles."""
    fold = Fold()
    rids: dict[tuple[int, int], str] = {}
    newest: dict[str, tuple[int, int]] = {}
    for frame in frames:
        side = frame.side or SideRecord()
        for i in range(frame.rows):
            handle = (int(frame.generation[i]), int(frame.slot[i]))
            opening = next((o for o in side.openings if o.row == i), None)
            if opening is not None:
                rids[handle] = opening.rid
                newest[opening.rid] = handle
            flags = int(frame.flags[i])
            finish = next((e.finish for e in side.extras if e.row == i), None)
            match = 0 if frame.match is None else int(frame.match[i])
            tokens = frame.token_ids[frame.token_indptr[i] : frame.token_indptr[i + 1]].tolist()
            logprobs = []
            if frame.logprobs is not None and frame.logprob_indptr is not None:
                logprobs = frame.logprobs[frame.logprob_indptr[i] : frame.logprob_indptr[i + 1]].tolist()
            reason = finish_reason(flags >> L.ROW_CODE_SHIFT, match, finish)
            restarted = bool(flags & L.ROW_RESTARTED)
            fold.push(Told(rids[handle], tokens, logprobs, int(frame.visible_len[i]), reason, restarted, opening))
        for handle_word in side.ended + side.dropped:
            handle = (handle_word >> L.SLOT_BITS, handle_word & 0xFFFFFFFF)
            rid = rids.pop(handle)
            if handle_word in side.dropped and newest[rid] == handle:
                fold.drop(rid)
    return fold


def total_tokens(frames: Sequence[Frame]) -> int:
    """Items in all frames."""
    return int(np.sum([len(frame.token_ids) for frame in frames]))
