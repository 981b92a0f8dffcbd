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
from gpupack.sglang.output_rows import OutputRows
from gpupack.sglang.request_states import WANTED, RequestStates
from gpupack.sglang.sent_state import SentState
from gpupack.sglang.versions import EngineVersion
from gpupack.wire.codec import encode_frame
from gpupack.wire.frame import Frame
from gpupack.wire.metadata import SideRecord

FINAL = L.ROW_FINAL | L.FINISH_HOST << L.ROW_CODE_SHIFT
NO_RANK = 2**31 - 1  # an engine without data parallelism has none, and its messages say so
_EMPTY = np.empty(0, np.int32)


class UnsupportedByWire(Exception):  # noqa: N818  (a way, not a fault: the batch goes as the engine's message)
    """What a frame cannot carry of a batch."""


class FrameMaker:
    """Makes unstamped frames; notes what the receiver has been told.

    A request opens with its first row on the stream. `close` says which handles must be dropped before rows of
    theirs go another way; they open again, resumed, with their next row.
    """

    def __init__(self, streamer: Any, engine: EngineVersion, request_states: RequestStates) -> None:
        self._streamer, self._engine, self._request_states = streamer, engine, request_states
        self._state = SentState(request_states)
        self._side = SideMaker(streamer, engine, request_states, self._state)
        self._spec = not streamer.spec_algorithm.is_none()
        self._step = 0

    def make(self, out: OutputRows) -> bytearray:
        """The frame of the rows; UnsupportedByWire, and nothing is noted, if it cannot carry them."""
        reasons = _checked_reasons(out)
        opening = self._state.opening_rows(out)
        try:
            side, fresh = self._side.side(out, opening, reasons)
            made = encode_frame(self._frame(out, opening, side))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError, WireError) as error:
            raise UnsupportedByWire(f"values that a frame cannot carry ({type(error).__name__})") from None
        self._state.note(out, opening)
        self._request_states.tell_inputs(out.reqs, out.slots, fresh)
        self._step += 1
        return made

    def close(self, slots: NDArray[np.int32]) -> bytearray | None:
        """A frame without rows that ends what is open of these slots; None: nothing is."""
        handles = self._state.close(slots)
        if not handles:
            return None
        return encode_frame(self._bare(idle=False, side=SideRecord(dropped=handles)))

    def _frame(self, out: OutputRows, opening: list[int], side: SideRecord) -> Frame:
        rows, reqs, final, membership = out.rows, out.reqs, out.final, out.batch.membership
        frame = self._bare(idle=not reqs, side=side)
        flags = np.zeros(len(reqs), np.int32)
        flags[opening] = L.ROW_OPENING
        flags[final] |= FINAL
        tokens, scores = token_items(out), None
        if out.batch.return_logprob:
            if out.batch.facts[C.BACKLOG]:
                self._check_backlog(out, opening)
            scores = logprob_items(out, membership.widths if out.whole else self._request_states.widths[out.slots])
            tokens = with_hidden(out, flags, tokens, scores)
        return frame._replace(
            slot=out.slots,
            generation=membership.generation if out.whole else self._request_states.generation[out.slots],
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

    def _check_backlog(self, out: OutputRows, opening: list[int]) -> None:
        """The receiver knows a logprob's token by its place: it must have had the tokens on this stream."""
        begins, ends = out.rows[C.LOGPROB_BEGIN], out.rows[C.LOGPROB_END]
        if ((ends > begins) & (begins < self._state.begins(out, opening))).any():
            raise UnsupportedByWire("logprobs of tokens that went as a message")


def _checked_reasons(out: OutputRows) -> dict[int, dict[str, Any]]:
    """Finish reasons by row; UnsupportedByWire if a frame cannot carry them, or something else of the batch."""
    for bit, name in enumerate(WANTED):
        if out.batch.wanted >> bit & 1:
            raise UnsupportedByWire(name.removeprefix("return_").replace("_", " "))
    if out.customized:
        raise UnsupportedByWire("customized info")
    reasons = {row: _reason_of(out.reqs[row]) for row in out.final}
    if not all(map(is_reason, reasons.values())):
        raise UnsupportedByWire("a finish reason that a frame cannot carry")
    return reasons


def _reason_of(req: Any) -> dict[str, Any]:
    """The finish reason, its status code as a number."""
    reason: dict[str, Any] = req.finished_reason.to_json()
    if isinstance(reason.get("status_code"), int):
        reason["status_code"] = int(reason["status_code"])
    return reason
