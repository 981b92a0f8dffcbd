"""What gpupack is told of a real request: at admission, and what is new with each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from newcomers import media_counts
from real import Setting

from gpupack import Request
from gpupack.sglang.payload import time_stats_bytes
from gpupack.streamer.cached_tokens import cached_tokens_details
from gpupack.wire.metadata import InputLogprobs

INPUT = ("token_logprobs_val", "token_logprobs_idx", "top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val",
         "token_ids_logprobs_idx")  # fmt: skip
COUNTS = ("reasoning_tokens", "retraction_counts", "cached_tokens", "image_tokens", "audio_tokens", "video_tokens")


def request_of(req: Any) -> Request:
    """What an engine would admit for a request of the package."""
    params = req.sampling_params
    return Request(
        req.rid,
        req.origin_input_ids_unpadded.tolist(),
        max_new_tokens=params.max_new_tokens,
        stream=req.stream,
        stream_interval=params.stream_interval,
        judge="engine",
        return_logprob=req.return_logprob,
        top_logprobs_num=req.logprob.top_logprobs_num,
        token_ids_logprob=req.logprob.token_ids_logprob or (),
        return_hidden_states=bool(req.return_hidden_states),
        return_routed_experts=req.return_routed_experts,
        return_indexer_topk=req.return_indexer_topk,
        http_worker_ipc=req.http_worker_ipc,
        decoded_text=req.decoded_text,
        cached_tokens=req.cached_tokens,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        no_stop_trim=params.no_stop_trim,
    )


def reason_of(req: Any) -> dict[str, Any]:
    """The finish reason, its status code as the number that the wire makes of it."""
    reason = req.finished_reason.to_json()
    return {key: int(value) if key == "status_code" and value is not None else value for key, value in reason.items()}


@dataclass
class Told:
    """What of a request has been attached."""

    hidden: int = 0
    custom: dict[str, int] = field(default_factory=dict)
    once: set[str] = field(default_factory=set)
    times: bytes = b""

    def news(self, req: Any, setting: Setting) -> dict[str, Any]:
        """Arguments of `OutputStreamer.attach`: what came since the last time."""
        new: dict[str, Any] = {}
        log = req.logprob
        if req.return_logprob and log.input_token_logprobs_val is not None and self._first("input_logprobs"):
            new["input_logprobs"] = InputLogprobs(**{name: getattr(log, f"input_{name}") for name in INPUT})
        if req.return_hidden_states and len(req.hidden_states) > self.hidden:
            new["hidden_states"] = req.hidden_states[self.hidden :]
            self.hidden = len(req.hidden_states)
        for name in ("routed_experts", "indexer_topk"):
            if getattr(req, f"return_{name}") and getattr(req, name) is not None and self._first(name):
                new[name] = getattr(req, name)
        info = self._custom(req)
        if info:
            new["customized_info"] = info
        if req.time_stats.encode_json():  # else it says nothing
            times = time_stats_bytes(req.time_stats)
            if times != self.times:
                new["time_stats"] = self.times = times
        if self._first("details"):
            details = cached_tokens_details(
                req.cached_tokens, req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage,
                storage_backend=setting.storage_tier,
            )  # fmt: skip
            if details is not None:
                new["cached_tokens_details"] = details
        return new

    def _first(self, name: str) -> bool:
        first = name not in self.once
        self.once.add(name)
        return first

    def _custom(self, req: Any) -> dict[str, Any]:
        info = {}
        for key, values in (req.customized_info or {}).items():
            begin = self.custom.get(key, 0)
            if key not in self.custom or (values is not None and len(values) > begin):
                info[key] = None if values is None else values[begin:]
                self.custom[key] = len(values or ())
        return info


def counts_of(reqs: list[Any]) -> dict[str, Any]:
    """Arguments of `OutputStreamer.set_counts` for a batch."""
    rows = [(req.reasoning_tokens, req.retraction_count, req.cached_tokens, *media_counts(req)) for req in reqs]
    return dict(zip(COUNTS, np.array(rows, np.int32).reshape(-1, len(COUNTS)).T.copy(), strict=True))
