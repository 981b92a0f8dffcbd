"""FrameMaker: the rows of a step, read from the engine's requests, as a frame of gpupack's wire."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.errors import WireError
from gpupack.request import is_reason
from gpupack.sglang import cursors as C
from gpupack.sglang.batch import Batch
from gpupack.sglang.frame_items import Items, logprob_items, spec_counters, token_items
from gpupack.sglang.roster import SETTLED, STATIC, WANTED, Roster
from gpupack.sglang.settled import Settle
from gpupack.sglang.versions import EngineVersion
from gpupack.sglang.weights import WeightSpans
from gpupack.wire.codec import encode_frame
from gpupack.wire.frame import Frame
from gpupack.wire.side import COUNTS, InputLogprobs, OpeningRecord, RowExtras, SideRecord
from gpupack.wire.verify_side import check_input_logprobs

INPUT = InputLogprobs.__struct_fields__
FINAL = L.ROW_FINAL | L.FINISH_HOST << L.ROW_CODE_SHIFT
NO_RANK = 2**31 - 1  # an engine without data parallelism has none, and its messages say so
_CARRIED = [name for name in SETTLED if name in COUNTS]
_blob = msgspec.msgpack.Encoder()
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
        self._settle = Settle(streamer)
        self._weights = WeightSpans(streamer, engine)
        self._spec = not streamer.spec_algorithm.is_none()
        self._decode_server = streamer.disaggregation_mode.name == "DECODE"
        self._open = np.zeros(0, np.int32)  # by slot: the generation that is open at the receiver, 0: none
        self._begin = np.zeros(0, np.int32)  # by slot: the first token that has been on the stream since it opened
        self._reasoning = np.zeros(0, np.int64)
        self._step = 0

    def make(self, batch: Batch, rows: NDArray[np.int32], final: list[int]) -> bytearray:
        """The frame of rows of `cursors.advance`; CannotTravel, and nothing is noted, if it cannot carry them."""
        self._reserve()
        (reqs, ids), slots = batch.rows_of(rows), rows[C.SLOT]
        self._check(batch, reqs, final)
        try:
            extras, fresh = self._extras(batch, reqs, slots, final)
            frame = self._frame(batch, reqs, ids, rows, final, extras)
            made = encode_frame(frame)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError, WireError) as error:
            raise CannotTravel(f"values that a frame cannot carry ({type(error).__name__})") from None
        opening = self._opening_rows(slots)
        self._begin[slots[opening]] = rows[C.TOKEN_BEGIN, opening]
        self._open[slots] = frame.generation
        self._open[slots[final]] = 0
        self._reasoning[slots] = [req.reasoning_tokens for req in reqs]
        for row in fresh:
            reqs[row].input_logprob_sent = True
        self._step += 1
        return made

    def _frame(
        self,
        batch: Batch,
        reqs: list[Any],
        ids: list[Any],
        rows: NDArray[np.int32],
        final: list[int],
        extras: dict[int, dict[str, Any]],
    ) -> Frame:
        slots = rows[C.SLOT]
        opening = self._opening_rows(slots)
        flags = np.zeros(len(reqs), np.int32)
        flags[opening] = L.ROW_OPENING
        flags[final] |= FINAL
        if batch.return_logprob:
            _check_backlog(rows, self._begins(rows, opening))
        tokens, scores = token_items(ids, batch.lens[rows[C.BATCH_INDEX]], rows), None
        if batch.return_logprob:
            scores = logprob_items(reqs, rows, self._roster.widths[slots])
            tokens = _with_hidden(reqs, rows, flags, tokens, scores)
        openings = [self._opening(row, reqs[row], rows) for row in opening]
        return Frame(
            stream_id=0,
            frame_no=0,
            dp_rank=self._dp_rank(),
            step=self._step,
            idle=not reqs,
            slot=slots,
            generation=self._roster.generation[slots],
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
            side=SideRecord(openings=openings, extras=[RowExtras(row=row, **extras[row]) for row in sorted(extras)]),
        )

    def _begins(self, rows: NDArray[np.int32], opening: list[int]) -> NDArray[np.int32]:
        """The first token of each row's request that has been on this stream, or comes with this frame."""
        begins: NDArray[np.int32] = self._begin[rows[C.SLOT]]
        begins[opening] = rows[C.TOKEN_BEGIN, opening]
        return begins

    def _opening_rows(self, slots: NDArray[np.int32]) -> list[int]:
        rows: list[int] = np.flatnonzero(self._open[slots] != self._roster.generation[slots]).tolist()
        return rows

    def close(self, slots: NDArray[np.int32]) -> bytearray | None:
        """A frame without rows that ends what is open of these slots; None: nothing is."""
        self._reserve()
        slots = slots[self._open[slots] != 0]
        if not len(slots):
            return None
        handles = self._open[slots].astype(np.int64) << L.SLOT_BITS | slots
        self._open[slots] = 0
        frame = Frame(
            stream_id=0,
            frame_no=0,
            dp_rank=self._dp_rank(),
            step=self._step,
            idle=False,
            slot=_EMPTY,
            generation=_EMPTY,
            flags=_EMPTY,
            visible_len=_EMPTY,
            match=None,
            token_indptr=np.zeros(1, np.int32),
            token_ids=_EMPTY,
            logprob_indptr=None,
            logprobs=None,
            side=SideRecord(dropped=handles.tolist()),
        )
        return encode_frame(frame)

    def _dp_rank(self) -> int:
        rank = self._engine.dp_rank(self._streamer)
        return NO_RANK if rank is None else rank

    def _check(self, batch: Batch, reqs: list[Any], final: list[int]) -> None:
        for bit, name in enumerate(WANTED):
            if batch.wanted >> bit & 1:
                raise CannotTravel(name.removeprefix("return_").replace("_", " "))
        infos = [req.customized_info for req in reqs]
        if infos.count(None) != len(infos):
            raise CannotTravel("customized info")
        for row in final:
            if not is_reason(_reason(reqs[row])):
                raise CannotTravel("a finish reason that a frame cannot carry")

    def _extras(
        self, batch: Batch, reqs: list[Any], slots: NDArray[np.int32], final: list[int]
    ) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Fields of RowExtras by row; and the rows whose input logprobs go with this frame."""
        extras: dict[int, dict[str, Any]] = {row: {"finish": _reason(reqs[row])} for row in final}
        opens, ends = set(self._opening_rows(slots)), set(final)
        counts = self._counts(reqs, slots, final)
        for row, told in counts.items():
            if row in opens:  # the opening record tells them
                continue
            fields = extras.setdefault(row, {})
            fields["counts"] = told
            details = self._roster.kept[_DETAILS, slots[row]]
            if details is not None:
                fields["cached_tokens_details"] = details
        for row in {*counts, *opens, *ends}:
            stats = self._roster.kept[_TIME_STATS, slots[row]].encode_json()
            spans = self._weights.of(reqs[row]) if row in ends else None
            if stats or spans:
                extras.setdefault(row, {})["time_stats"] = _blob.encode([stats or None, spans])
        fresh: list[int] = []
        if batch.return_logprob and not self._decode_server:
            for row, req in enumerate(reqs):
                log = req.logprob
                if req.return_logprob and not req.input_logprob_sent and log.input_token_logprobs_val is not None:
                    given = InputLogprobs(**{name: getattr(log, f"input_{name}") for name in INPUT})
                    check_input_logprobs(given)
                    extras.setdefault(row, {})["input_logprobs"] = given
                    fresh.append(row)
        return extras, fresh

    def _counts(self, reqs: list[Any], slots: NDArray[np.int32], final: list[int]) -> dict[int, dict[str, int]]:
        """Counts by row, of rows that are not settled and of those whose reasoning tokens have changed."""
        counts = self._settled(reqs, slots, final)
        reasoning = [req.reasoning_tokens for req in reqs]
        if any(reasoning):
            for row in np.flatnonzero(self._reasoning[slots] != reasoning).tolist():
                counts.setdefault(row, {})["reasoning_tokens"] = reasoning[row]
        return counts

    def _settled(self, reqs: list[Any], slots: NDArray[np.int32], final: list[int]) -> dict[int, dict[str, int]]:
        """Counts of rows that are not settled, read anew, by row."""
        found: dict[int, dict[str, int]] = {}
        for row in self._roster.unsettled(reqs, slots, final).tolist():
            values = self._settle.columns(reqs[row])
            self._roster.settle(int(slots[row]), values)
            found[row] = {str(name): value for name, value in zip(SETTLED, values, strict=True) if name in COUNTS}
        return found

    def _opening(self, row: int, req: Any, rows: NDArray[np.int32]) -> OpeningRecord:
        slot = rows[C.SLOT, row]
        static = dict(zip(STATIC, self._roster.kept[: len(STATIC), slot], strict=True))
        settled = dict(zip(SETTLED, self._roster.kept[len(STATIC) :, slot], strict=True))
        prompt = req.origin_input_ids_unpadded
        return OpeningRecord(
            row=row,
            rid=static["rids"],
            worker=static["http_worker_ipcs"],
            decoded_text=static["decoded_texts"],
            prompt_tail=prompt[len(prompt) - static["read_offsets"] :].tolist(),
            skip_special_tokens=static["skip_special_tokens"],
            spaces_between_special_tokens=static["spaces_between_special_tokens"],
            no_stop_trim=static["no_stop_trim"],
            prompt_tokens=settled["prompt_tokens"],
            cached_tokens_details=settled["cached_tokens_details"],
            tokens_before=int(rows[C.TOKEN_BEGIN, row]),
            resumed=not rows[C.FIRST, row],
            return_logprob=bool(req.return_logprob),
            top_logprobs_num=req.logprob.top_logprobs_num if req.return_logprob else 0,
            token_ids_logprob=list(req.logprob.token_ids_logprob or ()) if req.return_logprob else [],
            reasoning_tokens=req.reasoning_tokens,
            **{name: settled[name] for name in _CARRIED},
        )

    def _reserve(self) -> None:
        lacking = len(self._roster.generation) - len(self._open)
        if lacking:
            self._open = np.append(self._open, np.zeros(lacking, np.int32))
            self._begin = np.append(self._begin, np.zeros(lacking, np.int32))
            self._reasoning = np.append(self._reasoning, np.zeros(lacking, np.int64))


_DETAILS = len(STATIC) + SETTLED.index("cached_tokens_details")
_TIME_STATS = len(STATIC) + SETTLED.index("time_stats")


def _check_backlog(rows: NDArray[np.int32], begins: NDArray[np.int32]) -> None:
    """The receiver knows a logprob's token by its place: it must have had the tokens on this stream."""
    sent = rows[C.LOGPROB_END] > rows[C.LOGPROB_BEGIN]
    if (sent & (rows[C.LOGPROB_BEGIN] < begins)).any():
        raise CannotTravel("logprobs of tokens that went as a message")


def _reason(req: Any) -> dict[str, Any]:
    """The finish reason, its status code as a number."""
    reason: dict[str, Any] = req.finished_reason.to_json()
    if isinstance(reason.get("status_code"), int):
        reason["status_code"] = int(reason["status_code"])
    return reason


def _with_hidden(
    reqs: list[Any], rows: NDArray[np.int32], flags: NDArray[np.int32], tokens: Items, scores: Any
) -> Items:
    """Tokens with the one, not output, of each row that has a logprob at length 0; their rows are flagged."""
    hidden = np.flatnonzero((rows[C.TOKEN_END] == 0) & (np.diff(scores[0]) == 1))
    hidden = hidden[[bool(len(reqs[row].output_ids)) for row in hidden.tolist()]] if len(hidden) else hidden
    if not len(hidden):
        return tokens
    flags[hidden] |= L.ROW_HIDDEN_TOKEN
    lists = [tokens.items[a:b].tolist() for a, b in zip(tokens.indptr[:-1], tokens.indptr[1:], strict=True)]
    for row in hidden.tolist():
        lists[row] = [reqs[row].output_ids[0]]
    indptr = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(ids) for ids in lists], out=indptr[1:])
    return Items(indptr, np.array(list(chain.from_iterable(lists)), np.int32))
