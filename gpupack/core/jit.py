"""How loops over a batch are compiled by Numba: options and argument types, in one place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import int32, int64, njit, types

# Helpers are inlined and arrays are not reference-counted: with an atomic increment for each array that a
# helper takes, the loop takes nearly twice as long.
inlined = njit(nogil=True, forceinline=True, _nrt=False)
called = njit(nogil=True, _nrt=False)  # for what most batches do not need: their loop has nothing of it

# What the code of compiled loops follows from: they, what is inlined into them, and the constants that they name.
SOURCES = (
    "core/jit.py", "core/layout.py", "core/row_control.py", "backends/cpu/*.py", "streamer/find_passthrough.py",
    "streamer/join.py", "sglang/emit_rule.py", "sglang/device/loops.py", "wire/copying.py",
)  # fmt: skip


def _state_of_sources() -> str:
    """A digest of SOURCES, and of who compiles them: environments may share a checkout."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256(numba.__version__.encode())
    for path in sorted(path for pattern in SOURCES for path in folder.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


STATE = _state_of_sources()


def compiled(*signatures: Any) -> Callable[[Any], Any]:
    """Compile a function for these signatures now, or load it from Numba's cache; without any, at its first call.

    Numba goes by the time of the file that a function is in. What is inlined into it may come from another, so here
    the entry's name says what all of them contain.
    """

    def compile_now(function: Any) -> Any:
        function.__qualname__ = f"{function.__name__}_{STATE}"
        return njit(list(signatures) or None, cache=True, nogil=True, _nrt=False)(function)

    return compile_now


VECTOR32, VECTOR64 = int32[::1], int64[::1]
MATRIX32 = int32[:, ::1]
PLACES = types.UniTuple(int64, 4)  # of a packed step: its row stride, and where tokens, logprobs and families begin
