"""How loops over a batch are compiled by Numba: options and argument types, in one place."""

from __future__ import annotations

from numba import int32, int64, njit, types

# Helpers are inlined and arrays are not reference-counted: with an atomic increment for each array that a
# helper takes, the loop takes nearly twice as long.
COMPILED = {"cache": True, "nogil": True, "_nrt": False}
inlined = njit(nogil=True, forceinline=True, _nrt=False)
called = njit(nogil=True, _nrt=False)  # for what most batches do not need: their loop has nothing of it

VECTOR32, VECTOR64 = int32[::1], int64[::1]
MATRIX32 = int32[:, ::1]
PLACES = types.UniTuple(int64, 4)  # of a packed step: its row stride, and where tokens, logprobs and families begin
