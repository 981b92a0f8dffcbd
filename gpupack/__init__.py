"""gpupack: how output leaves an LLM serving scheduler.

Importing this package loads neither triton, numba nor zmq; they load where they are used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gpupack.config import EmitPolicy, PackerConfig
from gpupack.control import Control
from gpupack.errors import BackpressureError, GpupackError, InputError, PeerLostError, WireError
from gpupack.packed import PackedStep
from gpupack.packer import Packer
from gpupack.request import Request, Resume
from gpupack.ticket import Ticket

try:
    __version__ = version("gpupack")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_LAZY = {
    "OutputStreamer": "gpupack.streamer",
    "SendReport": "gpupack.streamer",
    "EmbeddingGather": "gpupack.embeddings",
    "OutputSender": "gpupack.transport.sender",
    "OutputReceiver": "gpupack.transport.receiver",
    "Delta": "gpupack.transport.receiver",
    "StopStringJudge": "gpupack.stop_strings",
    "Detokenizer": "gpupack.detokenizer",
    "TextStream": "gpupack.text_stream",
}

__all__ = [
    "BackpressureError",
    "Control",
    "Delta",
    "Detokenizer",
    "EmbeddingGather",
    "EmitPolicy",
    "GpupackError",
    "InputError",
    "OutputReceiver",
    "OutputSender",
    "OutputStreamer",
    "PackedStep",
    "Packer",
    "PackerConfig",
    "PeerLostError",
    "Request",
    "Resume",
    "SendReport",
    "StopStringJudge",
    "TextStream",
    "Ticket",
    "WireError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gpupack' has no attribute {name!r}")
