"""Message: the columns of a step, read from the engine's requests, as the engine's own message class."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence, Sized
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang import emit_rule as C
from gpupack.sglang.column_lists import logprob_lists, token_lists
from gpupack.sglang.output_rows import OutputRows
from gpupack.sglang.payload import Payloads
from gpupack.sglang.prefill_columns import PrefillColumns
from gpupack.sglang.request_states import KEPT, STATIC, RequestStates
from gpupack.sglang.versions import EngineVersion
from gpupack.sglang.weights import WeightSpans

SPEC = (
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_num_block_accept_tokens",
    "spec_num_cap_tokens",
    "spec_correct_drafts_histogram",
    "spec_cap_lens_histogram",
)
INPUT_LOGPROBS = (
    "input_token_logprobs_val",
    "input_token_logprobs_idx",
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
    "input_token_ids_logprobs_val",
    "input_token_ids_logprobs_idx",
)
OUTPUT_LOGPROBS = tuple(name.replace("input", "output") for name in INPUT_LOGPROBS)
RETURNED = ("output_hidden_states", "routed_experts", "indexer_topk")  # in the order of `request_states.WANTED`


class MessageMaker:
    """Makes the message of one step's rows; one per streamer.

    Values are the requests' own objects wherever the engine's streamer puts those: what leaves the process is
    the same. Columns of KEPT are reused while the same rows go out.
    """

    def __init__(self, streamer: Any, engine: EngineVersion, request_states: RequestStates) -> None:
        payloads = Payloads()
        self._plan = payloads.outputs
        self._absent: dict[str, Any] = dict.fromkeys(self._plan.none + self._plan.taken)
        self._dropped = frozenset(self._plan.dropped)
        self._wrap: Callable[[Any], Any] = import_module("sglang.srt.managers.io_struct").wrap_as_pickle
        self._streamer, self._engine, self._request_states = streamer, engine, request_states
        self._prefill_columns = PrefillColumns(streamer)
        self._spec = not streamer.spec_algorithm.is_none()
        self._decode_server = streamer.disaggregation_mode.name == "DECODE"
        self._weights = WeightSpans(streamer, engine)
        self._rows_kept: tuple[bytes, list[list[Any]]] = (b"", [[] for _ in KEPT])

    def make(self, out: OutputRows) -> Any:
        """The message of the rows."""
        columns = dict(zip(KEPT, self.kept(out), strict=True))
        columns["output_ids"], columns["decode_ids"] = self.ids(out)
        columns.update(self.others(out, columns["output_ids"]))
        if out.batch.return_logprob:
            columns.update(self.input_logprobs(out))
            columns.update(output_logprobs(out))
        columns["time_stats"] = self._wrap(columns["time_stats"])
        return self._plan.message(**{**self._absent, **self.known(columns)})

    def known(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Those columns for which the message has a field."""
        for name in self._dropped.intersection(columns):
            del columns[name]
        return columns

    def others(self, out: OutputRows, output: Sequence[Sized]) -> dict[str, Any]:
        """The columns that are neither of KEPT, nor ids or logprobs; `output` has the tokens of each row."""
        reqs, columns = out.reqs, dict[str, Any]()
        reasons: list[Any] = [None] * len(reqs)
        for row in out.final:
            reasons[row] = reqs[row].finished_reason.to_json()
        columns["finished_reasons"] = reasons
        columns["reasoning_tokens"] = out.reasoning
        columns["completion_tokens"] = out.rows[C.TOKEN_END].tolist()
        for name in SPEC:
            columns[name] = [getattr(req, name) for req in reqs] if self._spec else []
        columns.update(self._returned(reqs, out.batch.wanted))
        columns["customized_info"] = self._customized(out, output) if out.customized else None
        columns["dp_ranks"] = [self._engine.dp_rank(self._streamer)] * len(reqs) or None
        if self._weights.known and out.final:
            columns["weight_versions"] = self._weight_versions(reqs, out.final)
        return columns

    def kept(self, out: OutputRows) -> list[list[Any]]:
        """The columns of KEPT, stale prefill columns read anew; the same object while nothing changes."""
        request_states, slots = self._request_states, out.slots
        stale_prefill = request_states.stale_prefill(out.batch.membership, slots, out.stale)
        key = slots.tobytes()
        if not stale_prefill and key == self._rows_kept[0]:
            return self._rows_kept[1]
        for row in stale_prefill:
            request_states.set_prefill_columns(int(slots[row]), self._prefill_columns.columns(out.reqs[row]))
        kept: list[list[Any]] = request_states.kept[:, slots].tolist()
        self._rows_kept = (key, kept)
        return kept

    def ids(self, out: OutputRows) -> tuple[list[Any], list[Any]]:
        """Output ids and decode ids: the same arrays but where a request's first row brings the prompt's tail."""
        rows, packed = out.rows, out.packed
        if packed is None:
            begins, ends = rows[C.TOKEN_BEGIN].tolist(), rows[C.TOKEN_END].tolist()
            output = [one[begin:end] for one, begin, end in zip(out.ids, begins, ends, strict=True)]
        else:
            output = token_lists(packed.tokens)
        decode = output[:]
        for row in np.flatnonzero(rows[C.FIRST]).tolist():
            decode[row] = self.first_ids(out, row)
        return output, decode

    def first_ids(self, out: OutputRows, row: int) -> Any:
        """Decode ids of a request's first row: the prompt's tail before its output."""
        prompt, tail = out.reqs[row].origin_input_ids_unpadded, self._tails[out.slots[row]]
        return array("q", prompt[len(prompt) - tail :]) + out.ids[row][: out.rows[C.TOKEN_END, row]]

    @property
    def _tails(self) -> NDArray[Any]:
        return self._request_states.kept[STATIC.index("read_offsets")]

    def input_logprobs(self, out: OutputRows) -> dict[str, list[Any]]:
        """The six columns: once a request, with the first row after its prefill computed them.

        Rows without any share one empty list: every reader takes entries out of these, none puts any in.
        """
        nothing: list[Any] = []
        columns = {name: [nothing] * len(out.reqs) for name in INPUT_LOGPROBS}
        if self._decode_server:
            return columns
        fresh = self._request_states.fresh_inputs(out.batch.membership, out.reqs, out.slots)
        for row in fresh:
            for name in INPUT_LOGPROBS:
                columns[name][row] = getattr(out.reqs[row].logprob, name)
        self._request_states.tell_inputs(out.reqs, out.slots, fresh)
        return columns

    def _returned(self, reqs: list[Any], wanted: int) -> dict[str, list[Any]]:
        """Columns that a request of the batch asked for, none for one that did not."""
        columns: dict[str, list[Any]] = {}
        if wanted & 1:
            columns["output_hidden_states"] = [
                (req.hidden_states if req.finished_len is None else req.hidden_states[: req.finished_len])
                if req.return_hidden_states
                else None
                for req in reqs
            ]
        if wanted & 2:
            columns["routed_experts"] = [req.routed_experts if req.return_routed_experts else None for req in reqs]
        if wanted & 4:
            columns["indexer_topk"] = [req.indexer_topk if req.return_indexer_topk else None for req in reqs]
        return columns

    def _customized(self, out: OutputRows, output: Sequence[Sized]) -> Any:
        """Values by key, none for each token of a row that lacks a key; none without any."""
        infos, rows = [req.customized_info for req in out.reqs], out.rows
        columns: dict[str, list[Any]] = {}
        for info in infos:
            for key in info or ():
                if key not in columns:
                    columns[key] = [[None] * len(ids) for ids in output]
        for row, info in enumerate(infos):
            begin, end = rows[C.TOKEN_BEGIN, row], rows[C.TOKEN_END, row]
            for key, values in (info or {}).items():
                if values is not None:
                    columns[key][row] = values[begin:end]
        return self._wrap(columns) if columns else None

    def _weight_versions(self, reqs: list[Any], final: list[int]) -> list[Any] | None:
        """Which weights made which tokens, of the rows that are last."""
        versions: list[Any] = [None] * len(reqs)
        for row in final:
            versions[row] = self._weights.of(reqs[row])
        return versions if any(versions) else None


def output_logprobs(out: OutputRows) -> dict[str, list[Any]]:
    """The six columns, each request's own lists from its cursor on; those without any share one empty list."""
    if out.packed is not None:
        return logprob_lists(out.packed, out.reqs)
    nothing: list[Any] = []
    cuts = list(map(slice, out.rows[C.LOGPROB_BEGIN].tolist(), out.rows[C.LOGPROB_END].tolist()))
    logs = [req.logprob if req.return_logprob else None for req in out.reqs]
    columns = {}
    for name in OUTPUT_LOGPROBS:
        of = attrgetter(name)
        lists = [nothing if log is None else of(log) or nothing for log in logs]
        columns[name] = [one[cut] if one else nothing for one, cut in zip(lists, cuts, strict=True)]
    return columns
