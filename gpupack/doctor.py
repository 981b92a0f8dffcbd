"""`gpupack doctor`: what is usable on this machine, and what to do about what is not."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    usable: bool
    detail: str
    remedy: str = ""


def _package(name: str, remedy: str) -> Finding:
    try:
        import_module({"pyzmq": "zmq"}.get(name, name))
        return Finding(name, True, version(name))
    except (ImportError, PackageNotFoundError) as error:
        return Finding(name, False, str(error), remedy)


def _cuda() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("CUDA", True, torch.cuda.get_device_name())
    built = torch.version.cuda
    detail = f"torch {torch.__version__} is built for CUDA {built}, no GPU found" if built else "torch is a CPU build"
    return Finding("CUDA", False, detail, "not needed: the CPU backend packs; for a GPU install a CUDA build of torch")


def _pinned_memory() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("pinned memory", False, "needs CUDA", "not needed by the CPU backend")
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        return Finding("pinned memory", False, str(error), "raise the memory-lock limit (ulimit -l)")
    return Finding("pinned memory", True, "can be allocated")


def _interpreter() -> Finding:
    on = os.environ.get("TRITON_INTERPRET") == "1"
    if on:
        return Finding("triton interpreter", True, "TRITON_INTERPRET=1")
    return Finding(
        "triton interpreter", False, "off", "set TRITON_INTERPRET=1 before Python starts, to run kernels on the CPU"
    )


def _numba_cache() -> Finding:
    from gpupack import loop

    folder = str(loop.step_batch.stats.cache_path)
    if os.access(folder, os.W_OK):
        return Finding("numba cache", True, folder)
    return Finding("numba cache", False, f"{folder} cannot be written", "set NUMBA_CACHE_DIR to a folder that can")


def examine() -> list[Finding]:
    """Look at everything; never raises for something that is merely missing."""
    findings = [Finding("python", True, f"{platform.python_version()} ({sys.executable})")]
    for name, remedy in (
        ("torch", "pip install torch"),
        ("triton", "pip install triton (Linux only); needed for CUDA"),
        ("numba", "pip install numba; needed by the CPU backend"),
        ("pyzmq", "pip install pyzmq; needed to send and receive"),
        ("msgspec", "pip install msgspec; needed to send and receive"),
        ("tokenizers", "pip install 'gpupack[detok]'; needed for stop strings and text"),
    ):
        findings.append(_package(name, remedy))
    usable = {finding.name for finding in findings if finding.usable}
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("torch", _cuda),
        ("torch", _pinned_memory),
        ("triton", _interpreter),
        ("numba", _numba_cache),
    )
    return findings + [check() for needs, check in checks if needs in usable]
