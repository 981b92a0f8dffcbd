"""PendingFrames: what waits at a sender because the socket takes no more, merged and bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.transport.merge import merge_frames
from gpupack.transport.merge_sides import info_keys, side_growth
from gpupack.wire.codec import encode_frame
from gpupack.wire.frame import Buffer, Frame, view_frame

FAN_IN = 8  # frames that are merged at once: each waiting token is copied log8(steps) times
NO_ROW = -(1 << 62)  # no visible length continues from here


@dataclass(slots=True)
class _Group:
    """One or more frames that were merged, unstamped; `first` begins a run that joins nothing before it."""

    frame: bytearray
    level: int
    first: bool


class PendingFrames:
    """Frames in the order in which they came, adjacent ones merged where that says the same.

    `bytes` is what waits, `frames_merged` how many frames have gone into an earlier one so far. Merging is
    geometric (groups of `FAN_IN`, then groups of those), so thousands of waiting steps stay cheap. No
    merged frame passes `max_frame_bytes`. Nothing blocks.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.bytes = 0
        self.frames_merged = 0
        self._max_frame_bytes = max_frame_bytes
        self._groups: deque[_Group] = deque()
        # Of the run that new frames join, by slot: generation (0: no row), and visible length.
        self._generation = np.zeros(64, np.int32)
        self._visible = np.full(64, NO_ROW, np.int64)
        self._scored = np.zeros(64, np.bool_)  # slot: has logprobs
        self._run_bytes = self._run_tokens = 0
        self._run_keys: set[str] = set()  # of customized info
        self._alone = False  # the newest frame joins no other

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, frame: Buffer) -> None:
        """Take in a copy of a frame, after all others."""
        copy = bytearray(frame)
        columns = view_frame(copy)
        first = not self._groups or not self._joins(columns, len(copy))
        if first:
            self._begin_run()
        self._note(columns, len(copy))
        self._groups.append(_Group(copy, 0, first))
        self.bytes += len(copy)
        while self._tail_is_full():
            self._merge_tail(FAN_IN)

    def peek(self) -> bytearray:
        """The frame to send next; to be stamped by the caller."""
        return self._groups[0].frame

    def pop(self) -> None:
        """The frame that `peek` gave was sent."""
        self.bytes -= len(self._groups.popleft().frame)

    def clear(self) -> None:
        """Forget all of it."""
        self._groups.clear()
        self.bytes = 0

    def compact(self) -> None:
        """Merge all that can be merged, to get below a limit."""
        groups = list(self._groups)
        self._groups.clear()
        run: list[_Group] = []
        for group in groups:
            if group.first and run:
                self._append_merged(run)
                run = []
            run.append(group)
        if run:
            self._append_merged(run)

    def _tail_is_full(self) -> bool:
        if len(self._groups) < FAN_IN:
            return False
        level = self._groups[-1].level
        tail = [self._groups[-1 - i] for i in range(FAN_IN)]
        return all(group.level == level for group in tail) and not any(group.first for group in tail[:-1])

    def _merge_tail(self, count: int) -> None:
        self._append_merged([self._groups.pop() for _ in range(count)][::-1])

    def _append_merged(self, run: list[_Group]) -> None:
        if len(run) == 1:
            self._groups.append(run[0])
            return
        merged = encode_frame(
            merge_frames([view_frame(group.frame) for group in run]), max_frame_bytes=self._max_frame_bytes
        )
        self._groups.append(_Group(merged, max(group.level for group in run) + 1, run[0].first))
        self.bytes += len(merged) - sum(len(group.frame) for group in run)
        self.frames_merged += len(run) - 1

    def _begin_run(self) -> None:
        self._generation.fill(0)
        self._visible.fill(NO_ROW)
        self._scored.fill(False)
        self._run_bytes = self._run_tokens = 0
        self._run_keys.clear()

    def _joins(self, frame: Frame, size: int) -> bool:
        """Whether a frame, merged into the run, still says what it says on its own.

        Not if a slot comes under another generation, if a row opens or restarts again, comes after its
        final row, was cut (its tokens do not lead to its visible length) or has tokens without logprobs
        behind logprobs; or if a request resumes, as its old handle may have rows in the run.
        """
        if self._alone or _is_alone(frame):
            return False
        if self._run_bytes + _growth(frame, size) + self._padding(frame) > self._max_frame_bytes:
            return False
        if frame.side is not None and any(opening.resumed for opening in frame.side.openings):
            return False
        if not frame.rows:
            return True
        self._reserve(int(frame.slot.max()) + 1)
        generation = self._generation[frame.slot]
        again = (frame.flags & (L.ROW_OPENING | L.ROW_RESTARTED)) != 0
        continues = frame.visible_len - np.diff(frame.token_indptr) == self._visible[frame.slot]
        apart = (generation != frame.generation) | again | ~continues
        # The logprobs of a row are those of its last tokens, so tokens without any do not join behind them.
        apart |= self._scored[frame.slot] & (np.diff(frame.token_indptr) > 0) & (_scores(frame) == 0)
        return not np.count_nonzero(apart & (generation != 0))

    def _note(self, frame: Frame, size: int) -> None:
        self._run_bytes += _growth(frame, size) + self._padding(frame)
        self._run_tokens += len(frame.token_ids)
        self._run_keys |= info_keys(frame)
        self._alone = _is_alone(frame)
        if frame.rows:
            self._reserve(int(frame.slot.max()) + 1)
            self._generation[frame.slot] = frame.generation
            last = (frame.flags & (L.ROW_FINAL | L.ROW_HIDDEN_TOKEN)) != 0  # nothing joins such a row
            self._visible[frame.slot] = np.where(last, NO_ROW, frame.visible_len)
            self._scored[frame.slot] |= _scores(frame) > 0

    def _padding(self, frame: Frame) -> int:
        """Most bytes of nothing that joining a frame puts into customized info: one a token and key."""
        new, tokens = info_keys(frame) - self._run_keys, len(frame.token_ids)
        return len(new) * (self._run_tokens + tokens) + len(self._run_keys) * tokens

    def _reserve(self, slots: int) -> None:
        if slots > len(self._generation):
            more = 2 * slots - len(self._generation)
            self._generation = np.concatenate([self._generation, np.zeros(more, np.int32)])
            self._visible = np.concatenate([self._visible, np.full(more, NO_ROW, np.int64)])
            self._scored = np.concatenate([self._scored, np.zeros(more, np.bool_)])


def _scores(frame: Frame) -> NDArray[np.int32]:
    """Number of logprobs of each row, int32 `[rows]`."""
    return np.zeros(frame.rows, np.int32) if frame.logprob_indptr is None else np.diff(frame.logprob_indptr)


def _is_alone(frame: Frame) -> bool:
    """Whether a frame has arrays that are for all of its rows."""
    return frame.side is not None and (frame.side.embeddings is not None or frame.side.pooled_hidden_states is not None)


def _growth(frame: Frame, size: int) -> int:
    """Most bytes by which a merged frame grows: also `match` and logprob offsets, and longer row numbers."""
    return size + 4 * L.WORD * (frame.rows + 1) + side_growth(frame)
