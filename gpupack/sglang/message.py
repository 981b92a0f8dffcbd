"""Message: the columns of a step, read from the engine's requests, as the engine's own message class."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang import cursors as C
from gpupack.sglang.batch import Batch
from gpupack.sglang.device_lists import logprob_lists, token_lists
from gpupack.sglang.payload import Payloads
from gpupack.sglang.roster import KEPT, STATIC, Roster
from gpupack.sglang.settled import Settle
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
RETURNED = ("output_hidden_states", "routed_experts", "indexer_topk")  # in the order of `roster.WANTED`


class MessageMaker:
    """Makes the message of one step's rows; one per streamer.

    Values are the requests' own objects wherever the engine's streamer puts those: what leaves the process is
    the same. Columns of KEPT are reused while the same rows go out.
    """

    def __init__(self, streamer: Any, engine: EngineVersion, roster: Roster) -> None:
        payloads = Payloads()
        self._plan = payloads.outputs
        self._absent: dict[str, Any] = dict.fromkeys(self._plan.none + self._plan.taken)
        self._dropped = frozenset(self._plan.dropped)
        self._wrap: Callable[[Any], Any] = import_module("sglang.srt.managers.io_struct").wrap_as_pickle
        self._streamer, self._engine, self._roster = streamer, engine, roster
        self._settle = Settle(streamer)
        self._spec = not streamer.spec_algorithm.is_none()
        self._decode_server = streamer.disaggregation_mode.name == "DECODE"
        self._weights = WeightSpans(streamer, engine)
        self._rows_kept: tuple[bytes, list[list[Any]]] = (b"", [])

    def make(self, batch: Batch, rows: NDArray[np.int32], final: list[int]) -> Any:
        """The message of rows, int32 `[ROW_WIDTH, rows]` of `cursors.advance`; `final` are those that are last."""
        (reqs, ids), slots = batch.rows_of(rows), rows[C.SLOT]
        kept = self._kept(reqs, slots, final)
        columns: dict[str, Any] = dict(zip(KEPT, kept, strict=True))
        columns["time_stats"] = self._wrap(columns["time_stats"])
        reasons: list[Any] = [None] * len(reqs)
        for row in final:
            reasons[row] = reqs[row].finished_reason.to_json()
        columns["finished_reasons"] = reasons
        columns["reasoning_tokens"] = [req.reasoning_tokens for req in reqs]
        columns["completion_tokens"] = rows[C.TOKEN_END].tolist()
        output = None if batch.packed is None else token_lists(batch.packed.tokens)
        columns["output_ids"], columns["decode_ids"] = self._ids(reqs, ids, rows, output)
        for name in SPEC:
            columns[name] = [getattr(req, name) for req in reqs] if self._spec else []
        if batch.return_logprob:
            columns.update(_input_logprobs(reqs, sends=not self._decode_server))
            packed = batch.packed
            columns.update(_output_logprobs(reqs, rows) if packed is None else logprob_lists(packed, reqs))
        columns.update(self._returned(reqs, batch.wanted))
        columns["customized_info"] = self._customized(reqs, rows, columns["output_ids"])
        columns["dp_ranks"] = [self._engine.dp_rank(self._streamer)] * len(reqs) or None
        for name in self._dropped.intersection(columns):
            del columns[name]
        if self._weights.known and final:
            columns["weight_versions"] = self._weight_versions(reqs, final)
        return self._plan.message(**{**self._absent, **columns})

    def _kept(self, reqs: list[Any], slots: NDArray[np.int32], final: list[int]) -> list[list[Any]]:
        """The columns of KEPT, those of rows that are not settled read anew."""
        roster = self._roster
        unsettled = roster.unsettled(reqs, slots, final)
        key = slots.tobytes()
        if not len(unsettled) and key == self._rows_kept[0]:
            return self._rows_kept[1]
        for row in unsettled.tolist():
            roster.settle(int(slots[row]), self._settle.columns(reqs[row]))
        kept: list[list[Any]] = roster.kept[:, slots].tolist()
        self._rows_kept = (key, kept)
        return kept

    def _ids(
        self, reqs: list[Any], ids: list[Any], rows: NDArray[np.int32], output: list[Any] | None
    ) -> tuple[list[Any], list[Any]]:
        """Output ids and decode ids: the same arrays but where a request's first row brings the prompt's tail.

        `output`: output ids where they are known.
        """
        begins, ends = rows[C.TOKEN_BEGIN].tolist(), rows[C.TOKEN_END].tolist()
        if output is None:
            output = [one[begin:end] for one, begin, end in zip(ids, begins, ends, strict=True)]
        firsts = np.flatnonzero(rows[C.FIRST]).tolist()
        if not firsts:
            return output, output[:]
        decode = output[:]
        tails = self._roster.kept[STATIC.index("read_offsets")]
        for row in firsts:
            prompt, tail = reqs[row].origin_input_ids_unpadded, tails[rows[C.SLOT, row]]
            decode[row] = array("q", prompt[len(prompt) - tail :]) + ids[row][: ends[row]]
        return output, decode

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

    def _customized(self, reqs: list[Any], rows: NDArray[np.int32], output: list[Any]) -> Any:
        """Values by key, none for each token of a row that lacks a key; none without any."""
        infos = [req.customized_info for req in reqs]
        if infos.count(None) == len(infos):
            return None
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


def _input_logprobs(reqs: list[Any], *, sends: bool) -> dict[str, list[Any]]:
    """The six columns: once a request, with the first row after its prefill computed them.

    Rows without any share one empty list: every reader takes entries out of these, none puts any in.
    """
    nothing: list[Any] = []
    columns = {name: [nothing] * len(reqs) for name in INPUT_LOGPROBS}
    if not sends:
        return columns
    for row, req in enumerate(reqs):
        if req.return_logprob and not req.input_logprob_sent and req.logprob.input_token_logprobs_val is not None:
            for name in INPUT_LOGPROBS:
                columns[name][row] = getattr(req.logprob, name)
            req.input_logprob_sent = True
    return columns


def _output_logprobs(reqs: list[Any], rows: NDArray[np.int32]) -> dict[str, list[Any]]:
    """The six columns, each request's own lists from its cursor on; those without any share one empty list."""
    nothing: list[Any] = []
    cuts = list(map(slice, rows[C.LOGPROB_BEGIN].tolist(), rows[C.LOGPROB_END].tolist()))
    logs = [req.logprob if req.return_logprob else None for req in reqs]
    columns = {}
    for name in OUTPUT_LOGPROBS:
        of = attrgetter(name)
        lists = [nothing if log is None else of(log) or nothing for log in logs]
        columns[name] = [one[cut] if one else nothing for one, cut in zip(lists, cuts, strict=True)]
    return columns
