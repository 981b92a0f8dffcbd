"""The loops of `device_backlog.py`: accepted runs into rings, rows out of rings. Compiled by Numba.

An item at output position `p` of a slot lies at `p % window` of its ring.
"""

from __future__ import annotations

from numba import int32, int64, types, void

from gpupack.core.jit import MATRIX32, VECTOR32, compiled

BEGIN, END = 0, 1
"""Of a slot: the output positions whose items are kept are [BEGIN, END)."""

RECORDS = int32[:, :, ::1]
RINGS = types.Tuple((MATRIX32, MATRIX32, RECORDS))
"""Token ids and logprobs `[slots, window]`, records of top logprobs `[slots, record window, words]`."""
RUNS = types.Tuple((VECTOR32,) * 7)
"""Of a packed step: batch index; where tokens, logprobs and records of each row begin; their items."""
ITEMS = types.Tuple((VECTOR32,) * 7)
"""Of rows: where tokens, logprobs and records of each begin; token ids, logprobs, records, ids of the logprobs."""


@compiled(int64(MATRIX32, RINGS, RUNS, VECTOR32, VECTOR32, VECTOR32))
def take_runs(kept, rings, runs, slots, lens, widths):
    """Keep what of each accepted run the engine has committed; returns how many rows did not fit their run.

    A request's output has grown to `lens` since the last call; that is the beginning of its run, since an engine
    may discard the whole run or its end. `widths` are words of a record, by row of the batch. Of a request that grew
    by more nothing is kept.
    """
    token_ring, score_ring, record_ring = rings
    index, token_starts, score_starts, record_starts, tokens, scores, records = runs
    lost = row = 0
    for i in range(slots.shape[0]):
        slot, accept = slots[i], 0
        if row < index.shape[0] and index[row] == i:
            accept = token_starts[row + 1] - token_starts[row]
            row += 1
        old = kept[slot, END]
        new = lens[i] - old
        if new < 0 or new > accept:
            kept[slot, BEGIN] = kept[slot, END] = lens[i]
            lost += 1
            continue
        if new == 0:
            continue
        begin, score, record = token_starts[row - 1], score_starts[row - 1], record_starts[row - 1]
        scored = score_starts[row] - score == accept
        for j in range(new):
            token_ring[slot, (old + j) % token_ring.shape[1]] = tokens[begin + j]
            if scored:
                score_ring[slot, (old + j) % score_ring.shape[1]] = scores[score + j]
                for word in range(widths[i]):
                    place = (old + j) % record_ring.shape[1]
                    record_ring[slot, place, word] = records[record + j * widths[i] + word]
        window = record_ring.shape[1] if widths[i] else token_ring.shape[1]
        kept[slot, END] = lens[i]
        kept[slot, BEGIN] = max(kept[slot, BEGIN], lens[i] - window)
    return lost


@compiled(int64(MATRIX32, VECTOR32, MATRIX32, VECTOR32, ITEMS))
def measure(kept, slots, ranges, widths, items):
    """Write where the items of each row begin; returns the first row of which not all are kept, or -1.

    `ranges` `[4, rows]`: token begin and end, logprob begin and end. Of logprobs that do not exist yet there are none.
    """
    token_starts, score_starts, record_starts = items[0], items[1], items[2]
    token_starts[0] = score_starts[0] = record_starts[0] = 0
    for row in range(slots.shape[0]):
        slot = slots[row]
        first, last = kept[slot, BEGIN], kept[slot, END]
        tokens = max(ranges[1, row] - ranges[0, row], 0)
        scores = max(min(ranges[3, row], last) - ranges[2, row], 0)
        if tokens and (ranges[0, row] < first or ranges[1, row] > last):
            return row
        if scores and ranges[2, row] < first:
            return row
        token_starts[row + 1] = token_starts[row] + tokens
        score_starts[row + 1] = score_starts[row] + scores
        record_starts[row + 1] = record_starts[row] + scores * widths[row]
    return -1


@compiled(void(RINGS, VECTOR32, MATRIX32, VECTOR32, ITEMS))
def give_items(rings, slots, ranges, widths, items):
    """Copy the items of rows that `measure` has found kept."""
    token_ring, score_ring, record_ring = rings
    token_starts, score_starts, record_starts, tokens, scores, records, score_ids = items
    for row in range(slots.shape[0]):
        slot = slots[row]
        for j in range(token_starts[row + 1] - token_starts[row]):
            tokens[token_starts[row] + j] = token_ring[slot, (ranges[0, row] + j) % token_ring.shape[1]]
        for j in range(score_starts[row + 1] - score_starts[row]):
            place, at = ranges[2, row] + j, score_starts[row] + j
            scores[at] = score_ring[slot, place % score_ring.shape[1]]
            score_ids[at] = token_ring[slot, place % token_ring.shape[1]]
            for word in range(widths[row]):
                to = record_starts[row] + j * widths[row] + word
                records[to] = record_ring[slot, place % record_ring.shape[1], word]
