"""SideMaker: what a frame carries beside its columns, read from the engine's requests."""

from __future__ import annotations

from typing import Any

import msgspec

from gpupack.sglang import emit_rule as C
from gpupack.sglang.output_rows import Sending
from gpupack.sglang.prefill_columns import Settle
from gpupack.sglang.request_states import SETTLED, STATIC, Roster
from gpupack.sglang.sent_state import StreamState
from gpupack.sglang.versions import EngineVersion
from gpupack.sglang.weights import WeightSpans
from gpupack.wire.metadata import COUNTS, InputLogprobs, OpeningRecord, RowExtras, SideRecord, decode_side, encode_side
from gpupack.wire.verify_metadata import check_input_logprobs

INPUT = InputLogprobs.__struct_fields__
_CARRIED = [name for name in SETTLED if name in COUNTS]
_DETAILS = len(STATIC) + SETTLED.index("cached_tokens_details")
_TIME_STATS = len(STATIC) + SETTLED.index("time_stats")
_encode = msgspec.msgpack.Encoder().encode

Extras = dict[int, dict[str, Any]]
"""Fields of RowExtras by row."""


class SideMaker:
    """Makes side records; `state` says what the receiver has been told, and is not changed here."""

    def __init__(self, streamer: Any, engine: EngineVersion, roster: Roster, state: StreamState) -> None:
        self._roster, self._state = roster, state
        self._settle = Settle(streamer)
        self._weights = WeightSpans(streamer, engine)
        self._decode_server = streamer.disaggregation_mode.name == "DECODE"

    def side(
        self, sending: Sending, opening: list[int], reasons: dict[int, dict[str, Any]]
    ) -> tuple[SideRecord, list[int]]:
        """The side record of rows, with finish reasons by row, and the rows whose input logprobs are in it.

        WireError for what a reader would refuse.
        """
        extras: Extras = {row: {"finish": reason} for row, reason in reasons.items()}
        counts = self._counts(sending)
        self._add_counts(extras, counts, sending, opening)
        self._add_time_stats(extras, {*counts, *opening, *sending.final}, sending)
        fresh: list[int] = []
        if sending.batch.return_logprob and not self._decode_server:
            fresh = self._roster.fresh_inputs(sending.batch.group, sending.reqs, sending.slots)
            _add_input_logprobs(extras, sending.reqs, fresh)
        openings = [self._opening(row, sending) for row in opening]
        records = [RowExtras(row=row, **extras[row]) for row in sorted(extras)]
        side = SideRecord(openings=openings, extras=records)
        if openings or records:
            decode_side(encode_side(side))  # what a reader refuses, such as a long name, must not get there
        return side, fresh

    def _counts(self, sending: Sending) -> dict[int, dict[str, int]]:
        """Counts by row, of rows that are not settled and of those whose reasoning tokens have changed."""
        counts: dict[int, dict[str, int]] = {}
        for row in self._roster.unsettled(sending.batch.group, sending.slots, sending.stale):
            values = self._settle.columns(sending.reqs[row])
            self._roster.settle(int(sending.slots[row]), values)
            counts[row] = {str(name): value for name, value in zip(SETTLED, values, strict=True) if name in COUNTS}
        for row in sending.odd:
            reasoning = sending.reqs[row].reasoning_tokens
            if reasoning != self._state.reasoning[sending.slots[row]]:
                counts.setdefault(row, {})["reasoning_tokens"] = reasoning
        return counts

    def _add_counts(
        self, extras: Extras, counts: dict[int, dict[str, int]], sending: Sending, opening: list[int]
    ) -> None:
        for row in counts.keys() - set(opening):  # of those the opening record tells them
            fields = extras.setdefault(row, {})
            fields["counts"] = counts[row]
            details = self._roster.kept[_DETAILS, sending.slots[row]]
            if details is not None:
                fields["cached_tokens_details"] = details

    def _add_time_stats(self, extras: Extras, rows: set[int], sending: Sending) -> None:
        ends = set(sending.final)
        for row in rows:
            stats = self._roster.kept[_TIME_STATS, sending.slots[row]].encode_json()
            spans = self._weights.of(sending.reqs[row]) if row in ends else None
            if stats or spans:
                extras.setdefault(row, {})["time_stats"] = _encode([stats or None, spans])

    def _opening(self, row: int, sending: Sending) -> OpeningRecord:
        req, rows = sending.reqs[row], sending.rows
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


def _add_input_logprobs(extras: Extras, reqs: list[Any], rows: list[int]) -> None:
    for row in rows:
        log = reqs[row].logprob
        given = InputLogprobs(**{name: getattr(log, f"input_{name}") for name in INPUT})
        check_input_logprobs(given)
        extras.setdefault(row, {})["input_logprobs"] = given
