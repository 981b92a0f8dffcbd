"""WeightSpans: which version of the weights made which tokens of a finished request."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gpupack.sglang.versions import EngineVersion


class WeightSpans:
    """What versions that know of weight versions say with a final row; None in others."""

    def __init__(self, streamer: Any, engine: EngineVersion) -> None:
        self._streamer, self._current = streamer, engine.weight_version
        self._spans: Any = None
        if self._current is not None:
            self._spans = import_module("sglang.srt.utils.weight_versions").compute_weight_version_spans

    @property
    def known(self) -> bool:
        """Whether this version has them."""
        return self._current is not None

    def of(self, req: Any) -> Any:
        """The spans of a request whose output is known to its end."""
        if self._current is None:
            return None
        return self._spans(
            req.weight_version_events,
            current_version=self._current(self._streamer),
            num_output_tokens=len(req.output_ids_through_stop),
        )
