"""A request as an engine's scheduler keeps it: flags, cursors, arrays of all it has output, a timing record."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Any

PROMPT_TAIL = 5


class ServerRole(enum.Enum):
    """What a server does; travels with the timing record."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class TraceContext:
    """Where a request's trace stands."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled


@dataclass(eq=False)
class TimeStats:
    """The timing record that goes with every row.

    As in the engine, it decides itself what travels: nothing, unless the server is one half of a
    disaggregated pair or keeps metrics; the receiver fills in the rest.
    """

    role: ServerRole = ServerRole.BOTH
    with_metrics: bool = False
    trace: TraceContext = field(default_factory=TraceContext)
    queued_at: float = 0.0
    prefill_began_at: float = 0.0
    prefill_ended_at: float = 0.0
    decode_began_at: float = 0.0
    completed_at: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        if self.role is ServerRole.BOTH and not self.with_metrics:
            return {}
        return {"role": self.role.value, "queued_at": self.queued_at, "prefill_ended_at": self.prefill_ended_at}

    def __setstate__(self, state: dict[str, Any]) -> None:
        role = state.get("role")
        if isinstance(role, str):
            state["role"] = ServerRole(role)
        self.__dict__.update(state)


@dataclass(eq=False)
class SamplingParams:
    """What the loop reads of a request's parameters."""

    max_new_tokens: int = 1 << 20
    stream_interval: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()


@dataclass(eq=False)
class Logprobs:
    """Logprobs of a request: one entry per output token, and those of the prompt once prefill has them."""

    token_val: list[float] = field(default_factory=list)
    token_idx: list[int] = field(default_factory=list)
    top_val: list[Any] = field(default_factory=list)
    top_idx: list[Any] = field(default_factory=list)
    ids_val: list[Any] = field(default_factory=list)
    ids_idx: list[Any] = field(default_factory=list)
    prompt: dict[str, list[Any]] | None = None


@dataclass(eq=False)
class BaselineRequest:
    """One running request of the per-request loop."""

    rid: str
    prompt_ids: array[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = True
    return_logprob: bool = False
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    return_indexer_topk: bool = False
    http_worker_ipc: str | None = None
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: Logprobs = field(default_factory=Logprobs)
    finished_reason: dict[str, Any] | None = None
    finished_len: int | None = None
    finished_output: bool = False
    is_retracted: bool = False
    beam_group: Any = None
    send_token_offset: int = 0
    send_decode_id_offset: int = 0
    send_logprob_offset: int = 0
    input_logprob_sent: bool = False
    context_ids: array[int] | None = None
    context_output_len: int = 0
    context_start: int = 0
    read_offset: int = 0
    decoded_text: str = ""
    cached_tokens: int = 0
    cached_tokens_device: int = 0
    cached_tokens_host: int = 0
    cached_tokens_storage: int = 0
    reasoning_tokens: int = 0
    retraction_count: int = 0
    multimodal_inputs: Any = None
    image_tokens: int = 0
    audio_tokens: int = 0
    video_tokens: int = 0
    spec_verify_ct: int = 0
    spec_num_correct_drafts: int = 0
    hidden_states: list[Any] = field(default_factory=list)
    routed_experts: Any = None
    indexer_topk: Any = None
    customized_info: dict[str, list[Any] | None] | None = None
    time_stats: TimeStats = field(default_factory=TimeStats)

    def finished(self) -> bool:
        """Whether it has a finish reason."""
        return self.finished_reason is not None

    @property
    def visible_ids(self) -> array[int]:
        """Output up to the stop, which is inside."""
        return self.output_ids if self.finished_len is None else self.output_ids[: self.finished_len]

    def detokenizer_context(self) -> tuple[array[int], int]:
        """Prompt tail with all output behind it, and the length of the tail."""
        output = self.visible_ids
        if self.context_ids is None:
            self.read_offset = len(self.prompt_ids)
            self.context_start = max(self.read_offset - PROMPT_TAIL, 0)
            self.context_ids = self.prompt_ids[self.context_start :] + output
        else:
            self.context_ids.extend(output[self.context_output_len :])
        self.context_output_len = len(output)
        return self.context_ids, self.read_offset - self.context_start

    def tail_begins_stop(self) -> bool:
        """Whether the decoded tail could begin a stop string; the requests of the benchmark have none."""
        params = self.sampling_params
        if len(params.stop) == 0 and len(params.stop_regex) == 0:
            return False
        raise NotImplementedError("the baseline has no tokenizer")

    def multimodal_counts(self) -> tuple[int, int, int]:
        """Image, audio and video tokens of the prompt."""
        if self.multimodal_inputs is not None:
            return self.multimodal_inputs.token_counts()
        return self.image_tokens, self.audio_tokens, self.video_tokens
