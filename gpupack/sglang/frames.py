"""FrameMaker: the rows of a step, read from the engine's requests, as a frame of gpupack's wire."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.errors import WireError
from gpupack.core.request import is_reason
from gpupack.sglang import emit_rule as C
from gpupack.sglang.frame_items import logprob_items, spec_counters, token_items, with_hidden
from gpupack.sglang.frame_metadata import SideMaker
from gpupack.sglang.output_rows import Sending
from gpupack.sglang.request_states import WANTED, Roster
from gpupack.sglang.sent_state import StreamState
from gpupack.sglang.versions import EngineVersion
from gpupack.wire.codec import encode_frame
from gpupack.wire.frame import Frame
from gpupack.wire.metadata import SideRecord

FINAL = L.ROW_FINAL | L.FINISH_HOST << L.ROW_CODE_SHIFT
NO_RANK = 2**31 - 1  # an engine without data parallelism has none, and its messages say so
_EMPTY = np.empty(0, np.int32)


class CannotTravel(Exception):  # noqa: N818  (a way, not a fault: the batch goes as the engine's message)
    """What a frame cannot carry of a batch."""


class FrameMaker:
    """Makes unstamped frames; notes what the receiver has been told.

    A request opens with its first row on the stream. `close` says which handles must be dropped before rows of
    theirs go another way; they open again, resumed, with their next row.
    """

    def __init__(self, streamer: Any, engine: EngineVersion, roster: Roster) -> None:
        self._streamer, self._engine, self._roster = streamer, engine, roster
        self._state = StreamState(roster)
        self._side = SideMaker(streamer, engine, roster, self._state)
        self._spec = not streamer.spec_algorithm.is_none()
        self._step = 0

    def make(self, sending: Sending) -> bytearray:
        """The frame of the rows; CannotTravel, and nothing is noted, if it cannot carry them."""
        reasons = _checked_reasons(sending)
        opening = self._state.opening_rows(sending)
        try:
            side, fresh = self._side.side(sending, opening, reasons)
            made = encode_frame(self._frame(sending, opening, side))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError, WireError) as error:
            raise CannotTravel(f"values that a frame cannot carry ({type(error).__name__})") from None
        self._state.note(sending, opening)
        self._roster.tell_inputs(sending.reqs, sending.slots, fresh)
        self._step += 1
        return made

    def close(self, slots: NDArray[np.int32]) -> bytearray | None:
        """A frame without rows that ends what is open of these slots; None: nothing is."""
        handles = self._state.close(slots)
        if not handles:
            return None
        return encode_frame(self._bare(idle=False, side=SideRecord(dropped=handles)))

    def _frame(self, sending: Sending, opening: list[int], side: SideRecord) -> Frame:
        rows, reqs, final, group = sending.rows, sending.reqs, sending.final, sending.batch.group
        frame = self._bare(idle=not reqs, side=side)
        flags = np.zeros(len(reqs), np.int32)
        flags[opening] = L.ROW_OPENING
        flags[final] |= FINAL
        tokens, scores = token_items(sending), None
        if sending.batch.return_logprob:
            if sending.batch.facts[C.BACKLOG]:
                self._check_backlog(sending, opening)
            scores = logprob_items(sending, group.widths if sending.whole else self._roster.widths[sending.slots])
            tokens = with_hidden(sending, flags, tokens, scores)
        return frame._replace(
            slot=sending.slots,
            generation=group.generation if sending.whole else self._roster.generation[sending.slots],
            flags=flags,
            visible_len=rows[C.TOKEN_END],
            match=np.zeros(len(reqs), np.int32) if final else None,
            token_indptr=tokens.indptr,
            token_ids=tokens.items,
            logprob_indptr=scores and scores.indptr,
            logprobs=scores and scores.logprobs,
            families_indptr=scores and scores.families_indptr,
            families=scores and scores.families,
            spec=spec_counters(reqs) if self._spec and reqs else None,
        )

    def _bare(self, *, idle: bool, side: SideRecord) -> Frame:
        """A frame without rows."""
        rank = self._engine.dp_rank(self._streamer)
        return Frame(
            stream_id=0,
            frame_no=0,
            dp_rank=NO_RANK if rank is None else rank,
            step=self._step,
            idle=idle,
            slot=_EMPTY,
            generation=_EMPTY,
            flags=_EMPTY,
            visible_len=_EMPTY,
            match=None,
            token_indptr=np.zeros(1, np.int32),
            token_ids=_EMPTY,
            logprob_indptr=None,
            logprobs=None,
            side=side,
        )

    def _check_backlog(self, sending: Sending, opening: list[int]) -> None:
        """The receiver knows a logprob's token by its place: it must have had the tokens on this stream."""
        begins, ends = sending.rows[C.LOGPROB_BEGIN], sending.rows[C.LOGPROB_END]
        if ((ends > begins) & (begins < self._state.begins(sending, opening))).any():
            raise CannotTravel("logprobs of tokens that went as a message")


def _checked_reasons(sending: Sending) -> dict[int, dict[str, Any]]:
    """Finish reasons by row; CannotTravel if a frame cannot carry them, or something else of the batch."""
    for bit, name in enumerate(WANTED):
        if sending.batch.wanted >> bit & 1:
            raise CannotTravel(name.removeprefix("return_").replace("_", " "))
    if sending.customized:
        raise CannotTravel("customized info")
    reasons = {row: _reason_of(sending.reqs[row]) for row in sending.final}
    if not all(map(is_reason, reasons.values())):
        raise CannotTravel("a finish reason that a frame cannot carry")
    return reasons


def _reason_of(req: Any) -> dict[str, Any]:
    """The finish reason, its status code as a number."""
    reason: dict[str, Any] = req.finished_reason.to_json()
    if isinstance(reason.get("status_code"), int):
        reason["status_code"] = int(reason["status_code"])
    return reason
