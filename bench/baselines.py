"""What engines do today: a Python loop over the requests of a step, then pickle.

A per-request streamer with the columns and the bookkeeping of SPEC.md section 3 under the rule of the
0.5.23 preset, written for comparison only. Its cost per request is to be near that of the real
SGLang streamer, measured in DESIGN.md section 1; the real package is benchmarked as a peer elsewhere.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

PROMPT_TAIL = 5
COLUMNS = (
    "rids", "http_worker_ipcs", "finished_reasons", "decoded_texts", "decode_ids", "read_offsets", "output_ids",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "prompt_tokens", "completion_tokens",
    "cached_tokens", "cached_tokens_details", "reasoning_tokens", "retraction_counts", "image_tokens", "audio_tokens",
    "video_tokens", "time_stats",
)  # fmt: skip
LOGPROB_COLUMNS = (
    "input_token_logprobs_val", "input_token_logprobs_idx", "input_top_logprobs_val", "input_top_logprobs_idx",
    "input_token_ids_logprobs_val", "input_token_ids_logprobs_idx", "output_token_logprobs_val",
    "output_token_logprobs_idx", "output_top_logprobs_val", "output_top_logprobs_idx",
    "output_token_ids_logprobs_val", "output_token_ids_logprobs_idx",
)  # fmt: skip


@dataclass
class TimeStats:
    """The timing record that travels with every row of an engine's message."""

    queue_time: float = 0.0
    prefill_time: float = 0.0
    first_token_time: float = 0.0
    decode_time: float = 0.0


@dataclass(eq=False)
class SamplingParams:
    """The flags that the loop reads of each request."""

    stream_interval: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: tuple[str, ...] = ()


@dataclass(eq=False)
class BaselineRequest:
    """A request as an engine's scheduler keeps it: Python lists of everything it has output."""

    rid: str
    prompt_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = True
    return_logprob: bool = False
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    finished_reason: dict[str, Any] | None = None
    finished_len: int | None = None
    finished_output: bool = False
    send_token_offset: int = 0
    send_decode_id_offset: int = 0
    send_logprob_offset: int = 0
    decode_ids: list[int] | None = None
    decoded_len: int = 0
    read_offset: int = 0
    http_worker_ipc: str | None = None
    decoded_text: str = ""
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    retraction_count: int = 0
    multimodal_inputs: Any = None
    input_logprob_sent: bool = False
    time_stats: TimeStats = field(default_factory=TimeStats)

    @property
    def visible_ids(self) -> list[int]:
        """Output up to the stop."""
        if self.finished_len is not None:
            return self.output_ids[: self.finished_len]
        return self.output_ids

    def incremental_ids(self) -> tuple[list[int], int]:
        """Prompt tail and output so far, and the length of the tail."""
        output = self.visible_ids
        if self.decode_ids is None:
            tail = self.prompt_ids[-PROMPT_TAIL:]
            self.read_offset = len(tail)
            self.decode_ids = tail + output
        else:
            self.decode_ids.extend(output[self.decoded_len :])
        self.decoded_len = len(output)
        return self.decode_ids, self.read_offset

    def could_stop(self) -> bool:
        """Whether the tail could begin a stop string; none of the benchmark's requests has one."""
        return bool(self.sampling_params.stop)

    def cached_details(self) -> dict[str, int] | None:
        """Breakdown of cached tokens."""
        return {"device": self.cached_tokens, "host": 0} if self.cached_tokens > 0 else None

    def multimodal_counts(self) -> tuple[int, int, int]:
        """Image, audio and video tokens."""
        return (0, 0, 0) if self.multimodal_inputs is None else self.multimodal_inputs.counts()


@dataclass
class BatchMessage:
    """The message of one step: a list per column."""

    columns: dict[str, list[Any] | None]


class PerRequestStreamer:
    """The loop over requests, with the rule of the 0.5.23 preset."""

    def __init__(self, stream_interval: int = 1, force_interval: int = 50) -> None:
        self.stream_interval = stream_interval
        self.force_interval = force_interval

    def message(self, requests: list[BaselineRequest], return_logprob: bool) -> BatchMessage | None:
        """What the step sends, or None."""
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        scores: dict[str, list[Any]] = {name: [] for name in LOGPROB_COLUMNS} if return_logprob else {}
        for request in requests:
            if request.finished_reason is not None and request.finished_output:
                continue
            if self._sends(request):
                self._row(request, columns)
                if return_logprob:
                    self._logprobs(request, scores)
        if not columns["rids"]:
            return None
        absent = dict.fromkeys(LOGPROB_COLUMNS) if not return_logprob else {}
        return BatchMessage({**columns, **scores, **absent})

    def encode(self, message: BatchMessage) -> bytes:
        """The engine's default wire."""
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

    def _sends(self, request: BaselineRequest) -> bool:
        if request.finished_reason is not None:
            request.finished_output = True
            if request.finished_len is None:
                request.finished_len = len(request.output_ids)
            return True
        length = len(request.output_ids)
        if not request.stream:
            return length % self.force_interval == 0
        interval = request.sampling_params.stream_interval or self.stream_interval
        unsent = length - request.send_token_offset
        due = interval == 1 or unsent >= interval or (request.send_token_offset == 0 and unsent > 0)
        return due and not request.could_stop()

    def _row(self, request: BaselineRequest, columns: dict[str, list[Any]]) -> None:
        params = request.sampling_params
        columns["rids"].append(request.rid)
        columns["http_worker_ipcs"].append(request.http_worker_ipc)
        columns["finished_reasons"].append(request.finished_reason)
        output = request.visible_ids
        columns["output_ids"].append(output[request.send_token_offset :])
        request.send_token_offset = len(output)
        columns["decoded_texts"].append(request.decoded_text)
        decode_ids, read_offset = request.incremental_ids()
        columns["decode_ids"].append(decode_ids[request.send_decode_id_offset :])
        request.send_decode_id_offset = len(decode_ids)
        columns["read_offsets"].append(read_offset)
        columns["skip_special_tokens"].append(params.skip_special_tokens)
        columns["spaces_between_special_tokens"].append(params.spaces_between_special_tokens)
        columns["no_stop_trim"].append(params.no_stop_trim)
        columns["prompt_tokens"].append(len(request.prompt_ids))
        columns["completion_tokens"].append(len(output))
        columns["cached_tokens"].append(request.cached_tokens)
        columns["cached_tokens_details"].append(request.cached_details())
        columns["reasoning_tokens"].append(request.reasoning_tokens)
        columns["retraction_counts"].append(request.retraction_count)
        image, audio, video = request.multimodal_counts()
        columns["image_tokens"].append(image)
        columns["audio_tokens"].append(audio)
        columns["video_tokens"].append(video)
        columns["time_stats"].append(request.time_stats)

    def _logprobs(self, request: BaselineRequest, scores: dict[str, list[Any]]) -> None:
        for name in LOGPROB_COLUMNS[:6]:
            scores[name].append([])
        begin, end = request.send_logprob_offset, max(request.send_token_offset, 1)
        if request.return_logprob:
            scores["output_token_logprobs_val"].append(request.logprobs[begin:end])
            scores["output_token_logprobs_idx"].append(request.logprob_ids[begin:end])
            request.send_logprob_offset = end
        else:
            scores["output_token_logprobs_val"].append([])
            scores["output_token_logprobs_idx"].append([])
        for name in LOGPROB_COLUMNS[8:]:
            scores[name].append([])
