"""FrameMaker: the rows of a step, read from the engine's requests, as a frame of gpupack's wire."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.errors import WireError
from gpupack.request import is_reason
from gpupack.sglang import cursors as C
from gpupack.sglang.batch import Batch
from gpupack.sglang.frame_items import logprob_items, spec_counters, token_items, with_hidden
from gpupack.sglang.frame_side import SideMaker, reason_of
from gpupack.sglang.roster import WANTED, Roster
from gpupack.sglang.sending import Sending
from gpupack.sglang.stream_state import StreamState
from gpupack.sglang.versions import EngineVersion
from gpupack.wire.codec import encode_frame
from gpupack.wire.frame import Frame
from gpupack.wire.side import SideRecord

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

    def make(self, batch: Batch, rows: NDArray[np.int32], final: list[int]) -> bytearray:
        """The frame of rows of `cursors.advance`; CannotTravel, and nothing is noted, if it cannot carry them."""
        (reqs, ids), slots = batch.rows_of(rows), rows[C.SLOT]
        _check(batch, reqs, final)
        sending = Sending(batch, rows, slots, reqs, ids, final, self._state.opening_rows(slots))
        reasoning = [req.reasoning_tokens for req in reqs]
        try:
            side, fresh = self._side.side(sending, reasoning)
            made = encode_frame(self._frame(sending, side))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError, WireError) as error:
            raise CannotTravel(f"values that a frame cannot carry ({type(error).__name__})") from None
        self._state.note(sending, reasoning)
        for row in fresh:
            reqs[row].input_logprob_sent = True
        self._step += 1
        return made

    def close(self, slots: NDArray[np.int32]) -> bytearray | None:
        """A frame without rows that ends what is open of these slots; None: nothing is."""
        handles = self._state.close(slots)
        if not handles:
            return None
        return encode_frame(self._bare(idle=False, side=SideRecord(dropped=handles)))

    def _frame(self, sending: Sending, side: SideRecord) -> Frame:
        batch, rows, slots, reqs, ids, final, opening = sending
        frame = self._bare(idle=not reqs, side=side)
        flags = np.zeros(len(reqs), np.int32)
        flags[opening] = L.ROW_OPENING
        flags[final] |= FINAL
        packed = batch.packed
        tokens = packed.tokens if packed else token_items(ids, batch.lens[rows[C.BATCH_INDEX]], rows)
        if batch.return_logprob:
            self._check_backlog(sending)
            scores = packed.scores if packed else logprob_items(reqs, rows, self._roster.widths[slots])
            tokens = with_hidden(reqs, rows, flags, tokens, scores)
            frame = frame._replace(
                logprob_indptr=scores.indptr,
                logprobs=scores.logprobs,
                families_indptr=scores.families_indptr,
                families=scores.families,
            )
        return frame._replace(
            slot=slots,
            generation=self._roster.generation[slots],
            flags=flags,
            visible_len=rows[C.TOKEN_END],
            match=np.zeros(len(reqs), np.int32) if final else None,
            token_indptr=tokens.indptr,
            token_ids=tokens.items,
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

    def _check_backlog(self, sending: Sending) -> None:
        """The receiver knows a logprob's token by its place: it must have had the tokens on this stream."""
        begins, ends = sending.rows[C.LOGPROB_BEGIN], sending.rows[C.LOGPROB_END]
        if ((ends > begins) & (begins < self._state.begins(sending))).any():
            raise CannotTravel("logprobs of tokens that went as a message")


def _check(batch: Batch, reqs: list[Any], final: list[int]) -> None:
    for bit, name in enumerate(WANTED):
        if batch.wanted >> bit & 1:
            raise CannotTravel(name.removeprefix("return_").replace("_", " "))
    infos = [req.customized_info for req in reqs]
    if infos.count(None) != len(infos):
        raise CannotTravel("customized info")
    for row in final:
        if not is_reason(reason_of(reqs[row])):
            raise CannotTravel("a finish reason that a frame cannot carry")
