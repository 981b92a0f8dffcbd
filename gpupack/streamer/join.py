"""Join device-judged rows and gated rows into one packed step, in batch order; compiled by Numba."""

from __future__ import annotations

from numba import int64, void

from gpupack.core import layout as L
from gpupack.core.jit import PLACES, VECTOR32, compiled, inlined


@inlined
def _copy_items(source, stride, indptr_field, base, row, out, at):
    """Copy one row's items to out[at:]; returns where the next go."""
    indptr = L.HEADER_WORDS + indptr_field * stride + row
    for item in range(source[indptr], source[indptr + 1]):
        out[at] = source[base + item]
        at += 1
    return at


@compiled(void(VECTOR32, PLACES, VECTOR32, PLACES, VECTOR32, PLACES, int64))
def join_rows(a, a_at, b, b_at, out, out_at, spec_width):
    """Rows of `a` that are not conveyed, and all rows of `b`, by batch index; headers are added up. `*_at`: PLACES."""
    index = L.HEADER_WORDS + L.R_BATCH_INDEX
    flags = L.HEADER_WORDS + L.R_FLAGS * a_at[0]
    i = j = rows = 0
    token_at, score_at, family_at = out_at[1], out_at[2], out_at[3]
    for field in range(L.R_TOKEN_INDPTR, L.ROW_WIDTH):
        out[L.HEADER_WORDS + field * out_at[0]] = 0
    while i < a[L.H_ROWS] or j < b[L.H_ROWS]:
        if i < a[L.H_ROWS] and a[flags + i] & L.ROW_CONVEYED:
            i += 1
            continue
        if j >= b[L.H_ROWS] or (i < a[L.H_ROWS] and a[index + i] < b[index + j]):
            source, at, row = a, a_at, i
            i += 1
        else:
            source, at, row = b, b_at, j
            j += 1
        for field in range(L.R_TOKEN_INDPTR):
            out[L.HEADER_WORDS + field * out_at[0] + rows] = source[L.HEADER_WORDS + field * at[0] + row]
        for field in range(L.ROW_WIDTH, L.ROW_WIDTH + spec_width):
            out[L.HEADER_WORDS + field * out_at[0] + rows] = source[L.HEADER_WORDS + field * at[0] + row]
        token_at = _copy_items(source, at[0], L.R_TOKEN_INDPTR, at[1], row, out, token_at)
        score_at = _copy_items(source, at[0], L.R_LOGPROB_INDPTR, at[2], row, out, score_at)
        family_at = _copy_items(source, at[0], L.R_FAMILIES_INDPTR, at[3], row, out, family_at)
        rows += 1
        out[L.HEADER_WORDS + L.R_TOKEN_INDPTR * out_at[0] + rows] = token_at - out_at[1]
        out[L.HEADER_WORDS + L.R_LOGPROB_INDPTR * out_at[0] + rows] = score_at - out_at[2]
        out[L.HEADER_WORDS + L.R_FAMILIES_INDPTR * out_at[0] + rows] = family_at - out_at[3]
    for word in range(L.HEADER_WORDS):
        out[word] = a[word] + b[word] if word >= L.H_STALE else 0
    out[L.H_LAUNCH], out[L.H_BATCH], out[L.H_ROWS] = a[L.H_LAUNCH], a[L.H_BATCH], rows
    out[L.H_TOKENS], out[L.H_LOGPROBS] = token_at - out_at[1], score_at - out_at[2]
    out[L.H_FAMILIES] = family_at - out_at[3]
