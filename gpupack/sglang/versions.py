"""What is hooked in each version of sglang that the plugin knows, and where a version keeps what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

from gpupack.core.config import EmitPolicy

STREAMERS = "sglang.srt.managers.scheduler_components.output_streamer"


@dataclass(frozen=True)
class EngineVersion:
    """One version of the engine.

    Parameters
    ----------
    version
        As its package metadata has it.
    policy
        When its requests send.
    target, hook
        What is hooked in the scheduler: the method that gives the streamer's class ("around"), or the
        class itself ("replace").
    plugins_in_detokenizer
        Its detokenizer process loads plugins.
    device
        The device backend knows its scheduler.
    stream_interval, dp_rank, pp_size
        Of the server; functions of its streamer.
    weight_version
        The current one, or None where messages carry none; a function of its streamer.
    """

    version: str
    policy: EmitPolicy
    target: str
    hook: Literal["around", "replace"]
    plugins_in_detokenizer: bool
    device: bool
    stream_interval: Callable[[Any], int]
    dp_rank: Callable[[Any], int | None]
    pp_size: Callable[[Any], int]
    weight_version: Callable[[Any], str | None] | None

    @property
    def module(self) -> str:
        """The module that is hooked; where it is not loaded there is no scheduler."""
        return "sglang.srt.managers.scheduler"


@cache
def _context() -> Any:
    return import_module("sglang.srt.runtime_context")


VERSIONS = {
    "0.5.23": EngineVersion(
        version="0.5.23",
        policy=EmitPolicy.sglang_0_5_23(),
        target="sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
        hook="around",
        plugins_in_detokenizer=True,
        device=True,
        stream_interval=lambda streamer: _context().get_serving().stream_interval,
        dp_rank=lambda streamer: _context().get_parallel().dp_rank,
        pp_size=lambda streamer: _context().get_parallel().pp_size,
        weight_version=lambda streamer: _context().get_serving().weight_version,
    ),
    "0.5.16": EngineVersion(
        version="0.5.16",
        policy=EmitPolicy.sglang_0_5_16(),
        target="sglang.srt.managers.scheduler.SchedulerOutputStreamer",
        hook="replace",
        plugins_in_detokenizer=False,
        device=False,
        stream_interval=lambda streamer: streamer.server_args.stream_interval,
        dp_rank=lambda streamer: streamer.ps.dp_rank,
        pp_size=lambda streamer: streamer.ps.pp_size,
        weight_version=None,
    ),
}
