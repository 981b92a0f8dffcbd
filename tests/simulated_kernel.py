"""The pack kernel's contract on a simulated device's memory: what it reads, what it writes, and in which parts.

It reads the control block of the ring place that device memory says, the inputs by their addresses, and only then
changes the arena; the packed step appears bit by bit, in any order. Between parts the device may do other work.
The rule is the compiled loop's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.cpu.decode_fast_path import OTHER
from gpupack.backends.cpu.input_checks import LIMIT_BACKLOG, LIMIT_FAMILIES, LIMIT_POLICY, LIMIT_VOCAB, LIMITS
from gpupack.backends.cpu.pack_loop import pack_batch
from gpupack.core import layout as L
from gpupack.core.jit import compiled

INT32_MAX = 2**31 - 1
SLACK = 1 << 16  # words behind a packed step, for what a damaged state would write there
NO_CONTROL = np.empty((L.CONTROL_WIDTH, 0), np.int32)
NO_STARTS = np.empty(0, np.int32)
NOTHING = np.empty(0, np.int32)

Words = NDArray[Any]

_pack_batch = compiled()(pack_batch.py_func)  # kept in Numba's cache; compiled for what it is called with


class Memory(Protocol):
    """What the device sees at an address."""

    def at(self, address: int, dtype: Any, count: int) -> Words: ...


class Launch:
    """One launch of the pack kernel; the parts of `run` follow one another, other work may come between."""

    def __init__(self, memory: Memory, arguments: list[Words], constants: dict[str, Any], rows: int) -> None:
        """`arguments` are the device's views of arena, control, out and scan; `rows` all programs look at."""
        self.memory, self.k, self.rows = memory, constants, rows
        self.arena, self.control, self.out, self.scan = arguments
        self.optional: tuple[Any, ...] | None = None

    def run(self, order: random.Random) -> Iterator[None]:
        """Execute; yields between parts."""
        self.number, place = int(self.scan[L.SCAN_LAUNCH]), int(self.scan[L.SCAN_RING])
        assert 0 <= place < self.k["RING"], f"the place in the ring is {place}"
        yield
        self._read_control(place)
        yield
        self._read_inputs()
        yield
        out, spans = self._pack()
        yield
        order.shuffle(spans)
        target = self.out[place * self.k["OUT_WORDS"] :]
        for i, (start, words) in enumerate(spans):
            target[start : start + words] = out[start : start + words]
            if i % 6 == 5:
                yield
        self.scan[L.SCAN_LAUNCH] = 1 if self.number == INT32_MAX else self.number + 1
        self.scan[L.SCAN_RING] = (place + 1) % self.k["RING"]

    # --- what it reads ----------------------------------------------------------------------------

    def _read_control(self, place: int) -> None:
        words = self.control[place * self.k["CONTROL_WORDS"] :][: self.k["CONTROL_WORDS"]]
        self.word = words[: L.LAUNCH_ADDRESSES].tolist()
        self.addresses = words[L.LAUNCH_ADDRESSES : L.LAUNCH_WORDS].view(np.int64).tolist()
        self.batch, self.mode = self.word[L.LAUNCH_BATCH], self.word[L.LAUNCH_MODE]
        self.stray = self.word[L.LAUNCH_NUMBER] not in (-1, self.number)
        self.batch *= not self.stray
        assert 0 <= self.batch <= self.k["CAPACITY"], f"the control block says batch = {self.batch}"
        self.asked = NO_CONTROL
        if self.word[L.LAUNCH_CONTROLLED]:
            rows = words[L.LAUNCH_WORDS :][: L.CONTROL_WIDTH * self.batch]
            self.asked = rows.reshape(L.CONTROL_WIDTH, self.batch)[:, : self.rows].copy()

    def _dense(self, name: int, dtype: Any, stride: int, items: int) -> Words:
        """Copy of an input, `[rows * items]`: `items` of each row, rows `stride` items apart; empty if none."""
        address = self.addresses[name]
        if not address or not self.batch or not items:
            return np.empty(0, dtype)
        lie = self.memory.at(address, dtype, (self.batch - 1) * stride + items)
        step = lie.itemsize
        return np.lib.stride_tricks.as_strided(lie, (self.batch, items), (stride * step, step)).ravel()

    def _read_inputs(self) -> None:
        word, most = self.word, self.word[L.LAUNCH_MAX_ACCEPT]
        appending = self.mode & L.MODE_APPEND
        self.handles = self._dense(L.ADDRESS_HANDLES, np.int64, 1, 1)[: self.rows]
        self.lens = np.zeros(len(self.handles), np.int32)
        if appending:
            self.lens = self._dense(L.ADDRESS_ACCEPT_LENS, np.int32, 1, 1)[: self.rows]
        ids = np.int64 if word[L.LAUNCH_TOKEN_STEP] == 2 else np.int32
        self.token_ids = self._dense(L.ADDRESS_TOKEN_IDS, ids, word[L.LAUNCH_TOKEN_STRIDE], most)
        self.scores = self._dense(L.ADDRESS_LOGPROBS, np.int32, word[L.LAUNCH_LOGPROB_STRIDE], most)
        if self.k["FAMILY_WIDTH"] or self.k["SPEC_WIDTH"]:
            self.optional = self._read_optional(most)

    def _read_optional(self, most: int) -> tuple[Any, ...]:
        """The loop's `optional`, with the arenas that are behind the rings."""
        word, k = self.word, self.k
        top, ids = word[L.LAUNCH_TOP_WIDTH], word[L.LAUNCH_IDS_WIDTH]
        wide = np.int64 if word[L.LAUNCH_IDX_STEP] == 2 else np.int32
        top_val = self._dense(L.ADDRESS_TOP_VAL, np.int32, word[L.LAUNCH_TOP_STRIDE], most * top)
        top_idx = self._dense(L.ADDRESS_TOP_IDX, wide, word[L.LAUNCH_TOP_IDX_STRIDE], most * top)
        ids_val = self._dense(L.ADDRESS_IDS_VAL, np.int32, word[L.LAUNCH_IDS_STRIDE], most * ids)
        lens = [self._dense(name, np.int32, 1, 1)[: self.rows] for name in (L.ADDRESS_BLOCK_ACCEPT, L.ADDRESS_CAP)]
        families = k["FAMILY_WINDOW"] * k["FAMILY_WIDTH"]
        begin = k["CAPACITY"] * (L.STATE_WIDTH + k["WINDOW"] * (1 + k["LOGPROBS"]))
        ring = self._part(begin, families)
        spec = self._part(begin + k["CAPACITY"] * families, k["SPEC_WIDTH"])
        strides = np.array([most * top, top, most * ids, ids, max(k["FAMILY_WIDTH"], 1), 1], np.int64)
        return (ring, spec, top_val, top_idx.astype(np.int32), ids_val, *lens, NO_STARTS, strides)

    def _part(self, begin: int, width: int) -> Words:
        """An arena `[CAPACITY, width]`, a view."""
        return self.arena[begin : begin + self.k["CAPACITY"] * width].reshape(self.k["CAPACITY"], width)

    # --- what it does -----------------------------------------------------------------------------

    def _pack(self) -> tuple[Words, list[tuple[int, int]]]:
        """The packed step, and the words of it that are written."""
        k, size = self.k, self.k["CAPACITY"] * L.STATE_WIDTH
        shape = L.PackedShape(k["MAX_ITEMS"], k["LOGPROBS"], k["FAMILY_WINDOW"] * k["FAMILY_WIDTH"], k["SPEC_WIDTH"])
        layout = L.packed_layout(self.batch, shape)
        state, tokens = self._part(0, L.STATE_WIDTH), self._part(size, k["WINDOW"])
        scores = self._part(size + tokens.size, k["WINDOW"]) if k["LOGPROBS"] else np.zeros((1, 1), np.int32)
        wrong = self._wrong(state)
        handles = np.where(wrong, L.PADDING_HANDLE, self.handles)
        lens = np.where(wrong, 0, self.lens).astype(np.int32)
        starts = np.arange(len(handles), dtype=np.int32) * self.word[L.LAUNCH_MAX_ACCEPT]
        out = np.zeros(layout.size + SLACK, np.int32)
        limits = np.zeros(LIMITS, np.int64)
        limits[[LIMIT_POLICY, LIMIT_VOCAB]] = k["POLICY"], k["VOCAB_SIZE"]
        limits[[LIMIT_BACKLOG, LIMIT_FAMILIES]] = k["BACKLOG_LIMIT"], k["FAMILY_LIMIT"]
        _pack_batch(
            state, tokens, scores, self.optional, handles, lens, self.token_ids, starts, self.scores, starts,
            self.asked, out, layout[:4], limits, self.mode, self.number, np.full(len(handles), OTHER, np.uint8),
        )  # fmt: skip
        out[L.H_BATCH] = self.batch
        out[L.H_ERROR] = (
            L.ERROR_INPUT * bool(wrong.any()) | L.ERROR_NUMBER * self.stray | L.ERROR_BATCH * (self.batch > self.rows)
        )
        return out, self._spans(out, layout)

    def _spans(self, out: Words, layout: L.PackedLayout) -> list[tuple[int, int]]:
        rows, stride = int(out[L.H_ROWS]), layout.row_stride
        sections = [(layout.tokens, L.H_TOKENS), (layout.logprobs, L.H_LOGPROBS), (layout.families, L.H_FAMILIES)]
        spans = [(0, len(L.HEADER_FIELDS))]
        for column in range(L.ROW_WIDTH + self.k["SPEC_WIDTH"]):
            spans.append((L.HEADER_WORDS + column * stride, rows + (L.R_TOKEN_INDPTR <= column < L.ROW_WIDTH)))
        for (start, field), end in zip(sections, (layout.logprobs, layout.families, layout.size), strict=True):
            spans.append((start, int(out[field])))
            assert start + spans[-1][1] <= end, "more items than fit: the state is damaged"
        return spans

    def _wrong(self, state: Words) -> NDArray[np.bool_]:
        """Rows that the kernel reports instead of packing them."""
        slots = self.handles & 0xFFFFFFFF
        there = (self.handles >= 0) & (slots < self.k["CAPACITY"])
        own = state[np.where(there, slots, 0)]
        live = there & (own[:, L.GENERATION] == self.handles >> L.SLOT_BITS) & (own[:, L.FLAGS] & L.STATE_LIVE != 0)
        if self.asked.shape[1]:
            live &= self.asked[L.CONTROL_FLAGS_ROW] & L.CONTROL_SKIP == 0
        few = np.full(len(slots), not self.word[L.LAUNCH_HAS_LOGPROBS])
        if self.k["FAMILY_WIDTH"]:
            few |= own[:, L.WIDTHS] & L.TOP_WIDTH_MASK > self.word[L.LAUNCH_TOP_WIDTH]
            few |= own[:, L.WIDTHS] >> L.IDS_WIDTH_SHIFT > self.word[L.LAUNCH_IDS_WIDTH]
        wrong = (self.lens < 0) | (self.lens > self.word[L.LAUNCH_MAX_ACCEPT])
        wrong |= (own[:, L.FLAGS] & L.STATE_LOGPROBS != 0) & (self.lens > 0) & few
        if self.k["SPEC_WIDTH"] and self.mode & L.MODE_VERIFY and self.optional is not None:
            block, cap = self.optional[5], self.optional[6]
            wrong |= (block < 0) if len(block) else False
            wrong |= ((cap < 0) | (cap > self.k["MAX_ACCEPT"])) if len(cap) else False
        return live & wrong
