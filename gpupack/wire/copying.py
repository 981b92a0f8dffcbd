"""The copy of a packed step's columns and items into a frame, compiled by Numba."""

from __future__ import annotations

from numba import void

from gpupack.core import layout as L
from gpupack.core.jit import PLACES, VECTOR32, VECTOR64, compiled, inlined


@inlined
def _copy(source, begin, out, at, count):
    # Through slices: a loop over offsets of unknown sign is not vectorised, and three times as slow.
    taken, place = source[begin : begin + count], out[at : at + count]
    for i in range(count):
        place[i] = taken[i]


@compiled(void(VECTOR32, PLACES, VECTOR32, VECTOR64, VECTOR32))
def copy_sections(packed, at, out, places, row_flags):
    """Copy row columns, indptr and items of a packed step to their places in a frame, in int32 words.

    `at`: the packed step's `compiled.PLACES`. `places`: those of the frame, `FRAME_PLACES`.
    """
    rows, stride = places[3], at[0]
    for section in range(places[2]):
        begin = L.HEADER_WORDS + (L.R_SLOT + section) * stride
        _copy(packed, begin, out, places[0] + section * places[1], rows)
    flags = places[0] + (L.R_FLAGS - L.R_SLOT) * places[1]
    for row in range(row_flags.shape[0]):
        out[flags + row] |= row_flags[row]
    _copy(packed, L.HEADER_WORDS + L.R_TOKEN_INDPTR * stride, out, places[4], rows + 1)
    _copy(packed, at[1], out, places[5], places[6])
    if places[9] >= 0:
        _copy(packed, L.HEADER_WORDS + L.R_LOGPROB_INDPTR * stride, out, places[7], rows + 1)
        _copy(packed, at[2], out, places[8], places[9])
    if places[12]:
        _copy(packed, L.HEADER_WORDS + L.R_FAMILIES_INDPTR * stride, out, places[10], rows + 1)
        _copy(packed, at[3], out, places[11], places[12])
    for column in range(places[14]):
        begin = L.HEADER_WORDS + (L.ROW_WIDTH + column) * stride
        _copy(packed, begin, out, places[13] + column * rows, rows)


FRAME_PLACES = (
    "first row section",
    "words from one row section to the next",
    "row sections",
    "rows",
    "token_indptr",
    "token_ids",
    "tokens",
    "logprob_indptr",
    "logprobs",
    "number of logprobs, or -1 without logprob sections",
    "families_indptr",
    "families",
    "words of families",
    "spec",
    "spec_width",
)
