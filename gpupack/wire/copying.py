"""The copy of a packed step's columns and items into a frame, compiled by Numba."""

from __future__ import annotations

from numba import int64, njit, void

from gpupack import layout as L
from gpupack.loop import COMPILED, VECTOR32, VECTOR64, inlined


@inlined
def _copy(source, begin, out, at, count):
    # Through slices: a loop over offsets of unknown sign is not vectorised, and three times as slow.
    taken, place = source[begin : begin + count], out[at : at + count]
    for i in range(count):
        place[i] = taken[i]


def _copy_sections(packed, stride, tokens, logprobs, out, places, row_flags):
    """Copy row columns, indptr and items of a packed step to their places in a frame, in int32 words.

    `places`: the first row section, words from one to the next, how many there are, rows; then where
    token_indptr and token_ids go and how many tokens; the same for logprobs, -1 of them if absent.
    """
    rows = places[3]
    for section in range(places[2]):
        begin = L.HEADER_WORDS + (L.R_SLOT + section) * stride
        _copy(packed, begin, out, places[0] + section * places[1], rows)
    flags = places[0] + (L.R_FLAGS - L.R_SLOT) * places[1]
    for row in range(row_flags.shape[0]):
        out[flags + row] |= row_flags[row]
    _copy(packed, L.HEADER_WORDS + L.R_TOKEN_INDPTR * stride, out, places[4], rows + 1)
    _copy(packed, tokens, out, places[5], places[6])
    if places[9] >= 0:
        _copy(packed, L.HEADER_WORDS + L.R_LOGPROB_INDPTR * stride, out, places[7], rows + 1)
        _copy(packed, logprobs, out, places[8], places[9])


copy_sections = njit(void(VECTOR32, int64, int64, int64, VECTOR32, VECTOR64, VECTOR32), **COMPILED)(_copy_sections)
