"""PrefillColumns: what of a request a prefill settles, read from it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class PrefillColumns:
    """Reads the columns of `request_states.PREFILL_COLUMNS`.

    Time stats that say nothing (metrics are off) are one shared record: the engine makes nothing of each of
    them on the way out and nothing back, at a cost that is higher than that of everything else in a row.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._share = streamer.disaggregation_mode.name == "NULL"  # else they may begin to say something later
        self._nothing = import_module("sglang.srt.observability.req_time_stats").SchedulerReqTimeStats()

    def columns(self, req: Any) -> tuple[Any, ...]:
        """Values in the order of `request_states.PREFILL_COLUMNS`."""
        return (
            len(req.origin_input_ids),
            req.cached_tokens,
            self._streamer.get_cached_tokens_details(req),
            *_media(req),
            req.retraction_count,
            self._time_stats(req.time_stats),
        )

    def _time_stats(self, stats: Any) -> Any:
        return self._nothing if self._share and not stats.encode_json() else stats


def _media(req: Any) -> tuple[int, int, int]:
    """Image, audio and video tokens of the prompt."""
    if hasattr(req, "get_mm_token_counts"):
        counts: tuple[int, int, int] = req.get_mm_token_counts()
        return counts
    if req.mm_image_tokens or req.mm_audio_tokens or req.mm_video_tokens:
        return req.mm_image_tokens, req.mm_audio_tokens, req.mm_video_tokens
    if req.multimodal_inputs:
        image, audio, video = req.multimodal_inputs.compute_mm_token_counts()
        return image, audio, video
    return 0, 0, 0
