"""`loop.pack_batch` for packers with optional inputs; apart, because compiling it takes as long again."""

from __future__ import annotations

from numba import int32, int64, njit

from gpupack.compiled import COMPILED
from gpupack.loop import _pack_batch, pack_signature
from gpupack.loop_optional import OPTIONAL_TYPE

pack_batch_with_optional = njit([pack_signature(token, OPTIONAL_TYPE) for token in (int32, int64)], **COMPILED)(
    _pack_batch
)
