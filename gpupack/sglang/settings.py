"""Settings: what the environment says about the plugin; the only reader of its variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from gpupack.core.errors import ConfigError

Backend = Literal["host", "device", "engine"]
Wire = Literal["compatible", "native"]


@dataclass(frozen=True)
class Settings:
    """The plugin's variables, checked.

    Parameters
    ----------
    active
        GPUPACK_SGLANG=1: the engine's output path is gpupack's.
    backend
        GPUPACK_BACKEND: "host", which is the default; "engine": every batch goes through the engine's own streamer,
        counted and timed like the others, for comparisons; "device": what rows carry comes from steps packed in
        stream order, where an engine's version allows it; else "host".
    wire
        GPUPACK_WIRE: "compatible" (the default), the engine's own messages; "native", gpupack's frames.
    stats
        GPUPACK_STATS: a file that gets counters as JSON lines; empty: none.
    verify
        GPUPACK_VERIFY=1: run the engine's own streamer too, and compare each message with ours.
    """

    active: bool = False
    backend: Backend = "host"
    wire: Wire = "compatible"
    stats: str = ""
    verify: bool = False

    @classmethod
    def read(cls) -> Settings:
        """The variables of this process; ConfigError names the one that is wrong."""
        backend = os.environ.get("GPUPACK_BACKEND", "host")
        wire = os.environ.get("GPUPACK_WIRE", "compatible")
        for name, value, choices in (("GPUPACK_BACKEND", backend, Backend), ("GPUPACK_WIRE", wire, Wire)):
            if value not in get_args(choices):
                raise ConfigError(f"{name}: expected one of {get_args(choices)}, got {value!r}")
        return cls(
            active=_flag("GPUPACK_SGLANG"),
            backend=backend,  # type: ignore[arg-type]
            wire=wire,  # type: ignore[arg-type]
            stats=os.environ.get("GPUPACK_STATS", ""),
            verify=_flag("GPUPACK_VERIFY"),
        )


def _flag(name: str) -> bool:
    text = os.environ.get(name, "0")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{name}: expected 0 or 1, got {text!r}")
    return text == "1"
