"""Join device-judged rows and gated rows into one packed step, in batch order; compiled by Numba."""

from __future__ import annotations

from numba import int64, njit, void

from gpupack import layout as L
from gpupack.loop import COMPILED, VECTOR32, inlined


@inlined
def _copy_items(source, stride, indptr_field, base, row, out, at):
    """Copy one row's items to out[at:]; returns where the next go."""
    indptr = L.HEADER_WORDS + indptr_field * stride + row
    for item in range(source[indptr], source[indptr + 1]):
        out[at] = source[base + item]
        at += 1
    return at


def _join_rows(a, a_stride, a_tokens, a_scores, b, b_stride, b_tokens, b_scores, out, stride, token_base, score_base):
    """Rows of `a` that are not conveyed, and all rows of `b`, by batch index; headers are added up."""
    index = L.HEADER_WORDS + L.R_BATCH_INDEX
    flags = L.HEADER_WORDS + L.R_FLAGS * a_stride
    token_indptr = L.HEADER_WORDS + L.R_TOKEN_INDPTR * stride
    score_indptr = L.HEADER_WORDS + L.R_LOGPROB_INDPTR * stride
    i = j = rows = 0
    token_at, score_at = token_base, score_base
    out[token_indptr] = out[score_indptr] = 0
    while i < a[L.H_ROWS] or j < b[L.H_ROWS]:
        if i < a[L.H_ROWS] and a[flags + i] & L.ROW_CONVEYED:
            i += 1
            continue
        from_a = j >= b[L.H_ROWS] or (i < a[L.H_ROWS] and a[index + i] < b[index + j])
        if from_a:
            source, source_stride, source_tokens, source_scores, row = a, a_stride, a_tokens, a_scores, i
            i += 1
        else:
            source, source_stride, source_tokens, source_scores, row = b, b_stride, b_tokens, b_scores, j
            j += 1
        for field in range(L.R_TOKEN_INDPTR):
            out[L.HEADER_WORDS + field * stride + rows] = source[L.HEADER_WORDS + field * source_stride + row]
        token_at = _copy_items(source, source_stride, L.R_TOKEN_INDPTR, source_tokens, row, out, token_at)
        score_at = _copy_items(source, source_stride, L.R_LOGPROB_INDPTR, source_scores, row, out, score_at)
        rows += 1
        out[token_indptr + rows] = token_at - token_base
        out[score_indptr + rows] = score_at - score_base
    for word in range(L.HEADER_WORDS):
        out[word] = a[word] + b[word] if word >= L.H_STALE else 0
    out[L.H_LAUNCH], out[L.H_BATCH] = a[L.H_LAUNCH], a[L.H_BATCH]
    out[L.H_ROWS], out[L.H_TOKENS], out[L.H_LOGPROBS] = rows, token_at - token_base, score_at - score_base


join_rows = njit(
    void(VECTOR32, int64, int64, int64, VECTOR32, int64, int64, int64, VECTOR32, int64, int64, int64), **COMPILED
)(_join_rows)
