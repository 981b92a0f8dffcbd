"""The conveyed rows of a packed step, found by a loop that Numba compiles."""

from __future__ import annotations

from numba import boolean, int64, types

from gpupack.core import layout as L
from gpupack.core.jit import MATRIX32, VECTOR32, VECTOR64, compiled

ROW, BATCH_ROW, SLOT, ACCEPT_LEN, TOKEN_START, LOGPROB_START, RECORD_START = range(7)
FIELDS = 7


@compiled(types.UniTuple(int64, 2)(VECTOR32, int64, boolean[::1], VECTOR64, MATRIX32))
def find_conveyed(packed, stride, judged, handles, fields):
    """Write handles and `fields` of the conveyed rows; returns how many, and how many of their slots are `judged`."""
    count = found = 0
    columns = packed[L.HEADER_WORDS :]
    for row in range(packed[L.H_ROWS]):
        if not columns[L.R_FLAGS * stride + row] & L.ROW_CONVEYED:
            continue
        slot = columns[L.R_SLOT * stride + row]
        begin = columns[L.R_TOKEN_INDPTR * stride + row]
        handles[count] = int64(columns[L.R_GENERATION * stride + row]) << L.SLOT_BITS | slot
        fields[ROW, count] = row
        fields[BATCH_ROW, count] = columns[L.R_BATCH_INDEX * stride + row]
        fields[SLOT, count] = slot
        fields[ACCEPT_LEN, count] = columns[L.R_TOKEN_INDPTR * stride + row + 1] - begin
        fields[TOKEN_START, count] = begin
        fields[LOGPROB_START, count] = columns[L.R_LOGPROB_INDPTR * stride + row]
        fields[RECORD_START, count] = columns[L.R_FAMILIES_INDPTR * stride + row]
        found += judged[slot]
        count += 1
    return count, found
