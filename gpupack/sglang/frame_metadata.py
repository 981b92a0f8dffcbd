"""SideMaker: what a frame carries beside its columns, read from the engine's requests."""

from __future__ import annotations

from typing import Any

import msgspec

from gpupack.sglang import emit_rule as C
from gpupack.sglang.output_rows import OutputRows
from gpupack.sglang.prefill_columns import PrefillColumns
from gpupack.sglang.request_states import PREFILL_COLUMNS, STATIC, RequestStates
from gpupack.sglang.sent_state import SentState
from gpupack.sglang.versions import EngineVersion
from gpupack.sglang.weights import WeightSpans
from gpupack.wire.metadata import COUNTS, InputLogprobs, OpeningRecord, RowExtras, SideRecord, decode_side, encode_side
from gpupack.wire.verify_metadata import check_input_logprobs

INPUT = InputLogprobs.__struct_fields__
_CARRIED = [name for name in PREFILL_COLUMNS if name in COUNTS]
_DETAILS = len(STATIC) + PREFILL_COLUMNS.index("cached_tokens_details")
_TIME_STATS = len(STATIC) + PREFILL_COLUMNS.index("time_stats")
_encode = msgspec.msgpack.Encoder().encode

Extras = dict[int, dict[str, Any]]
"""Fields of RowExtras by row."""


class SideMaker:
    """Makes side records; `state` says what the receiver has been told, and is not changed here."""

    def __init__(self, streamer: Any, engine: EngineVersion, request_states: RequestStates, state: SentState) -> None:
        self._request_states, self._state = request_states, state
        self._prefill_columns = PrefillColumns(streamer)
        self._weights = WeightSpans(streamer, engine)
        self._decode_server = streamer.disaggregation_mode.name == "DECODE"

    def side(
        self, out: OutputRows, opening: list[int], reasons: dict[int, dict[str, Any]]
    ) -> tuple[SideRecord, list[int]]:
        """The side record of rows, with finish reasons by row, and the rows whose input logprobs are in it.

        WireError for what a reader would refuse.
        """
        extras: Extras = {row: {"finish": reason} for row, reason in reasons.items()}
        counts = self._counts(out)
        self._add_counts(extras, counts, out, opening)
        self._add_time_stats(extras, {*counts, *opening, *out.final}, out)
        fresh: list[int] = []
        if out.batch.return_logprob and not self._decode_server:
            fresh = self._request_states.fresh_inputs(out.batch.membership, out.reqs, out.slots)
            _add_input_logprobs(extras, out.reqs, fresh)
        openings = [self._opening(row, out) for row in opening]
        records = [RowExtras(row=row, **extras[row]) for row in sorted(extras)]
        side = SideRecord(openings=openings, extras=records)
        if openings or records:
            decode_side(encode_side(side))  # what a reader refuses, such as a long name, must not get there
        return side, fresh

    def _counts(self, out: OutputRows) -> dict[int, dict[str, int]]:
        """Counts by row, where prefill columns are read anew or reasoning tokens have changed."""
        counts: dict[int, dict[str, int]] = {}
        for row in self._request_states.stale_prefill(out.batch.membership, out.slots, out.stale):
            values = self._prefill_columns.columns(out.reqs[row])
            self._request_states.set_prefill_columns(int(out.slots[row]), values)
            counts[row] = {
                str(name): value for name, value in zip(PREFILL_COLUMNS, values, strict=True) if name in COUNTS
            }
        for row in out.odd:
            reasoning = out.reqs[row].reasoning_tokens
            if reasoning != self._state.reasoning[out.slots[row]]:
                counts.setdefault(row, {})["reasoning_tokens"] = reasoning
        return counts

    def _add_counts(
        self, extras: Extras, counts: dict[int, dict[str, int]], out: OutputRows, opening: list[int]
    ) -> None:
        for row in counts.keys() - set(opening):  # of those the opening record tells them
            fields = extras.setdefault(row, {})
            fields["counts"] = counts[row]
            details = self._request_states.kept[_DETAILS, out.slots[row]]
            if details is not None:
                fields["cached_tokens_details"] = details

    def _add_time_stats(self, extras: Extras, rows: set[int], out: OutputRows) -> None:
        ends = set(out.final)
        for row in rows:
            stats = self._request_states.kept[_TIME_STATS, out.slots[row]].encode_json()
            spans = self._weights.of(out.reqs[row]) if row in ends else None
            if stats or spans:
                extras.setdefault(row, {})["time_stats"] = _encode([stats or None, spans])

    def _opening(self, row: int, out: OutputRows) -> OpeningRecord:
        req, rows = out.reqs[row], out.rows
        slot = rows[C.SLOT, row]
        static = dict(zip(STATIC, self._request_states.kept[: len(STATIC), slot], strict=True))
        prefill = dict(zip(PREFILL_COLUMNS, self._request_states.kept[len(STATIC) :, slot], strict=True))
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
            prompt_tokens=prefill["prompt_tokens"],
            cached_tokens_details=prefill["cached_tokens_details"],
            tokens_before=int(rows[C.TOKEN_BEGIN, row]),
            resumed=not rows[C.FIRST, row],
            return_logprob=bool(req.return_logprob),
            top_logprobs_num=req.logprob.top_logprobs_num if req.return_logprob else 0,
            token_ids_logprob=list(req.logprob.token_ids_logprob or ()) if req.return_logprob else [],
            reasoning_tokens=req.reasoning_tokens,
            **{name: prefill[name] for name in _CARRIED},
        )


def _add_input_logprobs(extras: Extras, reqs: list[Any], rows: list[int]) -> None:
    for row in rows:
        log = reqs[row].logprob
        given = InputLogprobs(**{name: getattr(log, f"input_{name}") for name in INPUT})
        check_input_logprobs(given)
        extras.setdefault(row, {})["input_logprobs"] = given
