"""OutputColumns: the columns of SPEC.md section 3 as a receiver has them, under the field's own names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpupack.core import layout as L
from gpupack.transport.received import Delta, ReceivedStep, RequestRecord
from gpupack.wire.array import Array
from gpupack.wire.metadata import CachedTokensDetails, FinishReason, InputLogprobs

INPUT_LOGPROBS = InputLogprobs.__struct_fields__


@dataclass(slots=True)
class OutputColumns:
    """One entry a row in every column; None: the column is absent. Lists of Python values.

    `routed_experts` and `indexer_topk` have `Array`s, of the row with which they came; `time_stats` the newest
    bytes of each request. In delta mode `output_hidden_states` has those that are new with the row.
    """

    rids: list[str]
    http_worker_ipcs: list[str | None]
    finished_reasons: list[FinishReason | None]
    decoded_texts: list[str]
    decode_ids: list[list[int]]
    read_offsets: list[int]
    output_ids: list[list[int]]
    skip_special_tokens: list[bool]
    spaces_between_special_tokens: list[bool]
    no_stop_trim: list[bool]
    prompt_tokens: list[int]
    reasoning_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    cached_tokens_details: list[CachedTokensDetails | None]
    image_tokens: list[int]
    audio_tokens: list[int]
    video_tokens: list[int]
    retraction_counts: list[int]
    time_stats: list[bytes | None]
    spec_verify_ct: list[int]
    spec_num_correct_drafts: list[int]
    spec_num_block_accept_tokens: list[int]
    spec_num_cap_tokens: list[int]
    spec_correct_drafts_histogram: list[list[int]]
    spec_cap_lens_histogram: list[list[int]]
    input_token_logprobs_val: list[Any] | None = None
    input_token_logprobs_idx: list[Any] | None = None
    input_top_logprobs_val: list[Any] | None = None
    input_top_logprobs_idx: list[Any] | None = None
    input_token_ids_logprobs_val: list[Any] | None = None
    input_token_ids_logprobs_idx: list[Any] | None = None
    output_token_logprobs_val: list[list[float]] | None = None
    output_token_logprobs_idx: list[list[int | None]] | None = None
    output_top_logprobs_val: list[list[list[float]]] | None = None
    output_top_logprobs_idx: list[list[list[int]]] | None = None
    output_token_ids_logprobs_val: list[list[list[float]]] | None = None
    output_token_ids_logprobs_idx: list[list[list[int]]] | None = None
    output_hidden_states: list[Any] | None = None
    routed_experts: list[Any] | None = None
    indexer_topk: list[Any] | None = None
    customized_info: dict[str, list[list[Any]]] | None = None
    dp_ranks: list[int] | None = None

    @classmethod
    def of(cls, step: ReceivedStep) -> OutputColumns:
        """The columns of a step that was received."""
        deltas: list[Delta] = step.deltas()
        records: list[RequestRecord] = step.row_requests.tolist()
        openings = [record.opening for record in records]
        return cls(
            **_common(deltas, records),
            decoded_texts=[opening.decoded_text for opening in openings],
            decode_ids=[_decode_ids(delta, record) for delta, record in zip(deltas, records, strict=True)],
            read_offsets=[len(opening.prompt_tail) for opening in openings],
            output_ids=[delta.token_ids for delta in deltas],
            skip_special_tokens=[opening.skip_special_tokens for opening in openings],
            spaces_between_special_tokens=[opening.spaces_between_special_tokens for opening in openings],
            no_stop_trim=[opening.no_stop_trim for opening in openings],
            reasoning_tokens=[record.reasoning_tokens for record in records],
            completion_tokens=[delta.completion_tokens for delta in deltas],
            image_tokens=[record.image_tokens for record in records],
            audio_tokens=[record.audio_tokens for record in records],
            video_tokens=[record.video_tokens for record in records],
            **_spec(step),
            **(_logprobs(deltas, records) if step.frame.has_logprobs else {}),
            **_returned(step, deltas, records),
            customized_info=_customized_info(deltas),
            dp_ranks=[step.frame.dp_rank] * len(deltas) or None,
        )


@dataclass(slots=True)
class EmbeddingColumns:
    """The columns of an embedding frame."""

    rids: list[str]
    http_worker_ipcs: list[str | None]
    finished_reasons: list[FinishReason | None]
    embeddings: list[Any]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    cached_tokens_details: list[CachedTokensDetails | None]
    retraction_counts: list[int]
    time_stats: list[bytes | None]
    pooled_hidden_states: list[Any] | None = None

    @classmethod
    def of(cls, step: ReceivedStep) -> EmbeddingColumns:
        """The columns of a step that was received; pooled hidden states as SPEC.md section 3 has them."""
        deltas: list[Delta] = step.deltas()
        records: list[RequestRecord] = step.row_requests.tolist()
        dense = step.side.embeddings
        if dense is not None:
            embeddings = dense.tolist()
        else:
            embeddings = [None if delta.extras is None else delta.extras.embedding for delta in deltas]
        return cls(**_common(deltas, records), embeddings=embeddings, pooled_hidden_states=_pooled(step, deltas))


def _common(deltas: list[Delta], records: list[RequestRecord]) -> dict[str, Any]:
    """Columns that both kinds of frames have."""
    return {
        "rids": [delta.rid for delta in deltas],
        "http_worker_ipcs": [record.opening.worker for record in records],
        "finished_reasons": [delta.finish_reason for delta in deltas],
        "prompt_tokens": [record.prompt_tokens for record in records],
        "cached_tokens": [record.cached_tokens for record in records],
        "cached_tokens_details": [record.cached_tokens_details for record in records],
        "retraction_counts": [record.retraction_counts for record in records],
        "time_stats": [record.time_stats for record in records],
    }


def _decode_ids(delta: Delta, record: RequestRecord) -> list[int]:
    """The delta, behind the prompt's tail where the text of a request begins, or begins anew."""
    begins = delta.opening is not None and not delta.opening.resumed
    return [*record.opening.prompt_tail, *delta.token_ids] if begins or delta.restarted else delta.token_ids


def _spec(step: ReceivedStep) -> dict[str, list[Any]]:
    """The columns of speculative decoding, empty without it; histograms end at their last count."""
    names = [*L.SPEC_FIELDS, "correct_drafts_histogram", "cap_lens_histogram"]
    spec, rows = step.frame.spec, step.frame.rows
    if spec is None or not rows:
        return {f"spec_{name}": [] for name in names}
    counters = spec.reshape(-1, rows)
    histograms = np.split(counters[L.SPEC_HISTOGRAMS :], 2)
    values = [*counters[: L.SPEC_HISTOGRAMS].tolist(), *([_trimmed(row) for row in h.T.tolist()] for h in histograms)]
    return {f"spec_{name}": column for name, column in zip(names, values, strict=True)}


def _trimmed(counts: list[int]) -> list[int]:
    while counts and not counts[-1]:
        counts.pop()
    return counts


def _logprobs(deltas: list[Delta], records: list[RequestRecord]) -> dict[str, list[Any]]:
    """The columns of a batch that returns logprobs: an empty entry for what a row or request does not have."""
    columns: dict[str, list[Any]] = {f"input_{name}": [] for name in INPUT_LOGPROBS}
    for delta in deltas:
        logprobs = None if delta.extras is None else delta.extras.input_logprobs
        for name in INPUT_LOGPROBS:
            columns[f"input_{name}"].append([] if logprobs is None else getattr(logprobs, name))
    columns |= {
        "output_token_logprobs_val": [delta.logprobs for delta in deltas],
        "output_token_logprobs_idx": [delta.logprob_ids for delta in deltas],
        "output_top_logprobs_val": [delta.top_logprobs_val or [] for delta in deltas],
        "output_top_logprobs_idx": [delta.top_logprobs_idx or [] for delta in deltas],
        "output_token_ids_logprobs_val": [delta.token_ids_logprobs_val or [] for delta in deltas],
        "output_token_ids_logprobs_idx": [
            [record.opening.token_ids_logprob] * len(delta.token_ids_logprobs_val or ())
            for delta, record in zip(deltas, records, strict=True)
        ],
    }
    return columns


def _returned(step: ReceivedStep, deltas: list[Delta], records: list[RequestRecord]) -> dict[str, list[Any]]:
    """Columns that are there because a request of the batch asked for them; none for one that did not."""
    columns: dict[str, list[Any]] = {}
    returned = step.side.returned
    if "hidden_states" in returned:
        columns["output_hidden_states"] = [
            _hidden_states(delta) if record.opening.return_hidden_states else None
            for delta, record in zip(deltas, records, strict=True)
        ]
    for name in ("routed_experts", "indexer_topk"):
        if name in returned:
            columns[name] = [None if delta.extras is None else getattr(delta.extras, name) for delta in deltas]
    return columns


def _hidden_states(delta: Delta) -> list[Any]:
    states = None if delta.extras is None else delta.extras.hidden_states
    return [state.tolist() if isinstance(state, Array) else state for state in states or ()]


def _customized_info(deltas: list[Delta]) -> dict[str, list[list[Any]]] | None:
    """By key the values of each row's delta; none per token where a row lacks the key, absent without any key."""
    rows = [None if delta.extras is None else delta.extras.customized_info for delta in deltas]
    if not any(rows):
        return None
    lengths = [len(delta.token_ids) for delta in deltas]
    columns: dict[str, list[list[Any]]] = {}
    for info in rows:
        for key in info or ():
            columns.setdefault(key, [[None] * length for length in lengths])
    for row, info in enumerate(rows):
        for key, values in (info or {}).items():
            if values is not None:
                columns[key][row] = values
    return columns


def _pooled(step: ReceivedStep, deltas: list[Delta]) -> list[Any] | None:
    """One stacked array in a list of length one, or an entry a row, or no column."""
    if step.side.pooled_hidden_states is not None:
        return [step.side.pooled_hidden_states]
    states = [None if delta.extras is None else delta.extras.pooled_hidden_state for delta in deltas]
    return states if any(state is not None for state in states) else None
