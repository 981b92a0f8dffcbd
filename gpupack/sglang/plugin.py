"""The plugin's entry point in the processes of an SGLang engine (`sglang.srt.plugins: gpupack`)."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from multiprocessing import parent_process
from typing import Any

from gpupack.sglang.settings import Settings
from gpupack.sglang.versions import STREAMERS, VERSIONS, EngineVersion

logger = logging.getLogger(__name__)


def register() -> None:
    """Hook the engine's output path, if GPUPACK_SGLANG=1 and its version is known. Called by sglang in each process."""
    settings = Settings.read()
    if settings.active:
        hook(version("sglang"), settings)


def hook(installed: str, settings: Settings) -> None:
    """Hook what of the engine's version `installed` runs in this process; a warning, and nothing, for unknown ones."""
    engine = VERSIONS.get(installed)
    if engine is None:
        _leave(f"sglang {installed} is not known (known: {', '.join(VERSIONS)})")
        return
    if settings.backend == "device" and not engine.device:
        settings = replace(settings, backend="host")
        if parent_process() is None:
            logger.warning("gpupack: GPUPACK_BACKEND=device is not for sglang %s; the backend is host", installed)
    if engine.module in sys.modules:  # elsewhere there is no scheduler, and importing it would cost seconds
        _hook_scheduler(engine, settings)
    if settings.wire == "native" and engine.plugins_in_detokenizer and _is_detokenizer():
        _hook_detokenizer()


def _leave(why: str) -> None:
    if parent_process() is None:  # once, not in each of the engine's processes
        logger.warning("gpupack: %s; the engine is left as it is", why)


def _is_detokenizer() -> bool:
    return str(import_module("setproctitle").getproctitle()).startswith("sglang::detokenizer")


def _hook_detokenizer() -> None:
    from gpupack.sglang.receiver import NativeReceiver

    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    target = "sglang.srt.managers.detokenizer_manager.sock_recv"
    hooks.HookRegistry.register(target, NativeReceiver().receive, hooks.HookType.AROUND)


def _hook_scheduler(engine: EngineVersion, settings: Settings) -> None:
    from gpupack.sglang.streamer import streamer_class

    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    known = import_module(STREAMERS).SchedulerOutputStreamer
    if settings.backend == "device":
        from gpupack.sglang.device.hooks import hook_device

        hook_device()
    if engine.hook == "replace":
        hooks.HookRegistry.register(engine.target, streamer_class(known, engine, settings), hooks.HookType.REPLACE)
        return

    def around(original: Any, scheduler: Any) -> type:
        base = original(scheduler)
        return streamer_class(base, engine, settings, custom=base is not known, scheduler=scheduler)

    hooks.HookRegistry.register(engine.target, around, hooks.HookType.AROUND)
