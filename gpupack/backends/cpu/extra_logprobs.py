"""What only some packers have: top-k and token-ids logprobs, and speculative counters. Compiled into `loop.py`.

`optional` is a tuple with one entry for each name of OPTIONAL. A position of a request has one record of
2k + m words: k values of top logprobs, their k ids, m values of token-ids logprobs (`layout.WIDTHS`).
"""

from __future__ import annotations

from numba import types

from gpupack.core import layout as L
from gpupack.core.jit import MATRIX32, VECTOR32, VECTOR64, called, inlined

OPTIONAL = {
    "family_ring": MATRIX32,  # [capacity, family_window * record words]
    "spec": MATRIX32,  # [capacity, spec_width]
    "top_val": VECTOR32,  # bit patterns [B, S, K]; or whole records, joined
    "top_idx": VECTOR32,  # [B, S, K], each of one word or two, of which the low one counts
    "ids_val": VECTOR32,  # bit patterns [B, S, M]
    "block_accept_lens": VECTOR32,  # [B] or empty
    "cap_lens": VECTOR32,  # [B] or empty
    "record_starts": VECTOR32,  # [B]: where whole records of a run start in top_val; or empty
    "strides": VECTOR64,  # items of top_* from row to row and from position to position; of ids_val; see below
}
FAMILY_RING, SPEC, TOP_VAL, TOP_IDX, IDS_VAL, BLOCK_ACCEPT, CAP_LENS, RECORD_STARTS, STRIDES = range(9)
# Of `strides`: also the words of a record in the ring, and of an id in top_idx.
TOP_STRIDE, TOP_WIDTH, IDS_STRIDE, IDS_WIDTH, RING_STRIDE, IDX_STEP = range(6)
STRIDES_WIDTH = 6
OPTIONAL_TYPE = types.Tuple(tuple(OPTIONAL.values()))


@inlined
def widths_of(state, slot, optional):
    """The widths of a slot's records; 0 if there are none."""
    return state[slot, L.WIDTHS] if optional[FAMILY_RING].shape[1] else 0


@inlined
def _width(widths):
    return 2 * (widths & L.TOP_WIDTH_MASK) + (widths >> L.IDS_WIDTH_SHIFT)


@inlined
def counts_nothing(optional):
    """Whether the packer has no speculative counters."""
    return optional[SPEC].shape[1] == 0


@inlined
def put_record(optional, widths, i, place, out, base, at):
    """Write the record at `place` of row i's run to out[base + at:]; returns where the next goes."""
    _put_record(optional, widths, i, place, out, base + at)
    return at + _width(widths)


@inlined
def _put_record(optional, widths, i, place, out, at):
    """Write the record at `place` of row i's run to out[at:]."""
    top, ids = widths & L.TOP_WIDTH_MASK, widths >> L.IDS_WIDTH_SHIFT
    top_val, top_idx, ids_val, strides = optional[TOP_VAL], optional[TOP_IDX], optional[IDS_VAL], optional[STRIDES]
    if optional[RECORD_STARTS].shape[0]:
        begin = optional[RECORD_STARTS][i] + place * _width(widths)
        for j in range(_width(widths)):
            out[at + j] = top_val[begin + j]
        return
    begin = i * strides[TOP_STRIDE] + place * strides[TOP_WIDTH]
    step = strides[IDX_STEP]
    for j in range(top):
        out[at + j] = top_val[begin + j]
        out[at + top + j] = top_idx[(begin + j) * step]
    begin = i * strides[IDS_STRIDE] + place * strides[IDS_WIDTH]
    for j in range(ids):
        out[at + 2 * top + j] = ids_val[begin + j]


@called
def gather(optional, slot, widths, begin, end, old_len, i, out, base, at):
    """Copy the records of output positions [begin, end) to out[base + at:]; returns where the next go."""
    ring, width = optional[FAMILY_RING], _width(widths)
    if begin < old_len:
        stride = optional[STRIDES][RING_STRIDE]
        places = ring.shape[1] // stride
        for position in range(begin, min(end, old_len)):
            source = (position & (places - 1)) * stride
            for j in range(width):
                out[base + at + j] = ring[slot, source + j]
            at += width
    for position in range(max(begin, old_len), end):
        _put_record(optional, widths, i, position - old_len, out, base + at)
        at += width
    return at


@called
def keep(optional, slot, widths, begin, end, old_len, i):
    """Keep the records of the run from output position `begin` on in the ring: they are unsent."""
    ring, stride = optional[FAMILY_RING][slot], optional[STRIDES][RING_STRIDE]
    places = ring.shape[0] // stride
    for position in range(max(begin, old_len), end):
        _put_record(optional, widths, i, position - old_len, ring, (position & (places - 1)) * stride)


@called
def count(optional, slot, i, accept, mode):
    """Count a verify step of a slot."""
    spec = optional[SPEC]
    if not mode & L.MODE_VERIFY or accept == 0 or spec.shape[1] == 0:
        return
    buckets = (spec.shape[1] - L.SPEC_HISTOGRAMS) // 2
    spec[slot, L.SPEC_VERIFY_CT] += 1
    spec[slot, L.SPEC_CORRECT_DRAFTS] += accept - 1
    spec[slot, L.SPEC_HISTOGRAMS + accept - 1] += 1
    if optional[BLOCK_ACCEPT].shape[0]:
        spec[slot, L.SPEC_BLOCK_ACCEPT] += optional[BLOCK_ACCEPT][i]
    if mode & L.MODE_CAP_LENS:
        spec[slot, L.SPEC_CAP_TOKENS] += optional[CAP_LENS][i]
        spec[slot, L.SPEC_HISTOGRAMS + buckets + optional[CAP_LENS][i]] += 1


@called
def put_counts(optional, slot, out, stride, row):
    """Write a slot's counters into the columns of row `row`."""
    spec = optional[SPEC]
    for j in range(spec.shape[1]):
        out[L.HEADER_WORDS + (L.ROW_WIDTH + j) * stride + row] = spec[slot, j]


@called
def convey_counts(optional, i, mode, out, stride, row):
    """Write what the gate will count, into the columns of a conveyed row: the lens as they came in."""
    at = L.HEADER_WORDS + L.ROW_WIDTH * stride + row
    for j in range(optional[SPEC].shape[1]):
        out[at + j * stride] = 0
    if optional[SPEC].shape[1] and mode & L.MODE_VERIFY:
        if optional[BLOCK_ACCEPT].shape[0]:
            out[at + L.SPEC_BLOCK_ACCEPT * stride] = optional[BLOCK_ACCEPT][i]
        if mode & L.MODE_CAP_LENS:
            out[at + L.SPEC_CAP_TOKENS * stride] = optional[CAP_LENS][i]
