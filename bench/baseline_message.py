"""The message that the per-request loop sends: a list per column, with an entry per row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INPUT_LOGPROBS = (
    "input_token_logprobs_val", "input_token_logprobs_idx", "input_top_logprobs_val", "input_top_logprobs_idx",
    "input_token_ids_logprobs_val", "input_token_ids_logprobs_idx",
)  # fmt: skip
OUTPUT_LOGPROBS = (
    "output_token_logprobs_val", "output_token_logprobs_idx", "output_top_logprobs_val", "output_top_logprobs_idx",
    "output_token_ids_logprobs_val", "output_token_ids_logprobs_idx",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class BatchMessage:
    """The columns of one step; None where the whole column is absent."""

    rids: list[str] = field(default_factory=list)
    http_worker_ipcs: list[str | None] = field(default_factory=list)
    finished_reasons: list[dict[str, Any] | None] = field(default_factory=list)
    decoded_texts: list[str] = field(default_factory=list)
    decode_ids: list[Any] = field(default_factory=list)
    read_offsets: list[int] = field(default_factory=list)
    output_ids: list[Any] = field(default_factory=list)
    skip_special_tokens: list[bool] = field(default_factory=list)
    spaces_between_special_tokens: list[bool] = field(default_factory=list)
    no_stop_trim: list[bool] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    cached_tokens_details: list[dict[str, int] | None] = field(default_factory=list)
    reasoning_tokens: list[int] = field(default_factory=list)
    retraction_counts: list[int] = field(default_factory=list)
    image_tokens: list[int] = field(default_factory=list)
    audio_tokens: list[int] = field(default_factory=list)
    video_tokens: list[int] = field(default_factory=list)
    time_stats: list[Any] = field(default_factory=list)
    spec_verify_ct: list[int] = field(default_factory=list)
    spec_num_correct_drafts: list[int] = field(default_factory=list)
    input_token_logprobs_val: list[Any] | None = None
    input_token_logprobs_idx: list[Any] | None = None
    input_top_logprobs_val: list[Any] | None = None
    input_top_logprobs_idx: list[Any] | None = None
    input_token_ids_logprobs_val: list[Any] | None = None
    input_token_ids_logprobs_idx: list[Any] | None = None
    output_token_logprobs_val: list[Any] | None = None
    output_token_logprobs_idx: list[Any] | None = None
    output_top_logprobs_val: list[Any] | None = None
    output_top_logprobs_idx: list[Any] | None = None
    output_token_ids_logprobs_val: list[Any] | None = None
    output_token_ids_logprobs_idx: list[Any] | None = None
    output_hidden_states: list[Any] | None = None
    routed_experts: list[Any] | None = None
    indexer_topk: list[Any] | None = None
    customized_info: dict[str, list[Any]] | None = None
    beam_output: list[Any] | None = field(default_factory=list)
    dp_ranks: list[int] | None = None
