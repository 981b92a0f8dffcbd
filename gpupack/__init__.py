"""gpupack: how output leaves an LLM serving scheduler.

Importing this package loads neither triton, numba nor zmq; they load where they are used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gpupack.core.config import EmitPolicy, PackerConfig
from gpupack.core.errors import BackpressureError, GpupackError, InputError, PeerLostError, WireError
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Request, Resume
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket

try:
    __version__ = version("gpupack")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_LAZY = {
    "OutputStreamer": "gpupack.streamer.output_streamer",
    "SendReport": "gpupack.streamer.output_streamer",
    "EmbeddingGather": "gpupack.streamer.embeddings",
    "OutputSender": "gpupack.transport.sender",
    "OutputReceiver": "gpupack.transport.receiver",
    "Delta": "gpupack.transport.receiver",
    "StopStringJudge": "gpupack.text.stop_strings",
    "Detokenizer": "gpupack.text.detokenizer",
    "TextStream": "gpupack.text.text_stream",
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
