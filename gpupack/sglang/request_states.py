"""RequestStates: the engine's requests by slot, with what of them rarely or never changes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.sglang import emit_rule as C
from gpupack.sglang.batch_membership import BatchMembership
from gpupack.sglang.unsupported import why_unsupported

STATIC = (
    "rids",
    "http_worker_ipcs",
    "decoded_texts",
    "read_offsets",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
)
"""Columns that stay as they are for the whole life of a request."""

PREFILL_COLUMNS = (
    "prompt_tokens",
    "cached_tokens",
    "cached_tokens_details",
    "image_tokens",
    "audio_tokens",
    "video_tokens",
    "retraction_counts",
    "time_stats",
)
"""Columns that a prefill sets: they are read again with each row until one has gone out, after a retraction
with every row, and with the final one."""

KEPT = STATIC + PREFILL_COLUMNS
PROMPT_TAIL = 5  # prompt tokens that a first row's decode ids begin with
WANTED = ("return_hidden_states", "return_routed_experts", "return_indexer_topk")


class RequestStates:
    """Slots of requests: given when one is first seen, taken back when the engine lets go of it.

    The engine says of no request that it is gone (one that is aborted in the queue just disappears), so a
    slot ends with its request: a weak reference tells.

    Attributes
    ----------
    cursors
        int32 `[slots, CURSOR_WIDTH]`, see `emit_rule.py`. A request's own fields are behind them; `flush` brings
        those up to date, `reload` takes what they say.
    kept
        object `[len(KEPT), slots]`, the columns of KEPT.
    prefill_known
        bool `[slots]`: the columns of PREFILL_COLUMNS have been read.
    generation
        int32 `[slots]`: how many requests a slot has had.
    wanted
        uint8 `[slots]`: a bit for each of WANTED.
    widths
        int32 `[slots, 2]`: top and token-ids logprobs a position that a request asked for.
    input_logprobs_sent
        bool `[slots]`: input logprobs have been sent, or were not asked for.
    why
        Reason by slot for which a request goes through the engine's own streamer; None: it is covered.
    """

    def __init__(self, slots: int = 64) -> None:
        self.cursors = np.zeros((slots, C.CURSOR_WIDTH), np.int32)
        self.kept = np.full((len(KEPT), slots), None, object)
        self.prefill_known = np.zeros(slots, np.bool_)
        self.generation = np.zeros(slots, np.int32)
        self.wanted = np.zeros(slots, np.uint8)
        self.unsupported = np.zeros(slots, np.bool_)
        self.widths = np.zeros((slots, 2), np.int32)
        self.input_logprobs_sent = np.zeros(slots, np.bool_)
        self.why: list[str | None] = [None] * slots
        self._slot_of: dict[int, int] = {}
        self._references: list[Any] = [None] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._membership = self._made([], np.empty(0, np.int32))

    def membership_of(self, reqs: Sequence[Any]) -> BatchMembership:
        """The requests of a batch; those that are new get a slot."""
        if reqs == self._membership.reqs:  # by identity: requests compare no other way
            return self._membership
        find = self._slot_of.get
        slots = [find(id(req), -1) for req in reqs]
        if -1 in slots:
            slots = [self._admit(req) if slot < 0 else slot for req, slot in zip(reqs, slots, strict=True)]
        self._membership = self._made(list(reqs), np.array(slots, np.int32))
        return self._membership

    def slots_of(self, reqs: Sequence[Any]) -> NDArray[np.int32]:
        """Slots of requests, int32 `[n]`; those that are new get one."""
        return self.membership_of(reqs).slots

    def _made(self, reqs: list[Any], slots: NDArray[np.int32]) -> BatchMembership:
        unsupported = self.unsupported[slots]
        why = self.why[int(slots[int(unsupported.argmax())])] if np.count_nonzero(unsupported) else None
        scored = bool((self.cursors[slots, C.FLAGS] & L.STATE_LOGPROBS).all())
        return BatchMembership(
            reqs, slots, self.generation[slots], why, self.wanted[slots], self.widths[slots], scored=scored
        )

    def stale_prefill(self, membership: BatchMembership, slots: NDArray[np.int32], stale: list[int]) -> list[int]:
        """Rows whose columns of PREFILL_COLUMNS are to be read anew; `stale`: they may have changed."""
        if stale:
            self.prefill_known[slots[stale]] = membership.prefill_known = False
        if membership.prefill_known:
            return []
        rows: list[int] = np.flatnonzero(~self.prefill_known[slots]).tolist()
        membership.prefill_known = not rows and bool(self.prefill_known[membership.slots].all())
        return rows

    def fresh_inputs(self, membership: BatchMembership, reqs: list[Any], slots: NDArray[np.int32]) -> list[int]:
        """Rows whose input logprobs have been computed and not sent."""
        if membership.input_logprobs_sent:
            return []
        waiting = np.flatnonzero(~self.input_logprobs_sent[slots]).tolist()
        membership.input_logprobs_sent = not waiting and bool(self.input_logprobs_sent[membership.slots].all())
        return [row for row in waiting if reqs[row].logprob.input_token_logprobs_val is not None]

    def tell_inputs(self, reqs: list[Any], slots: NDArray[np.int32], rows: list[int]) -> None:
        """The input logprobs of these rows are sent."""
        if rows:
            self.input_logprobs_sent[slots[rows]] = True
            for row in rows:
                reqs[row].input_logprob_sent = True

    def set_prefill_columns(self, slot: int, values: tuple[Any, ...]) -> None:
        """Take what was read for a slot."""
        for index, value in enumerate(values, len(STATIC)):
            self.kept[index, slot] = value
        self.prefill_known[slot] = True

    def __len__(self) -> int:
        return len(self._slot_of)

    def disagreeing(self, reqs: Sequence[Any], slots: NDArray[np.int32]) -> int:
        """How many requests have other cursors in their own fields than here."""
        return sum(
            tuple(self.cursors[slot, C.TOKEN_CURSOR :].tolist()) != _cursors_of(req)
            for req, slot in zip(reqs, slots.tolist(), strict=True)
        )

    def flush(self, reqs: Sequence[Any], slots: NDArray[np.int32]) -> None:
        """Write the cursors to the requests' own fields, before the engine's streamer looks at them.

        Not those of requests that always go the engine's way: it may have dropped their output.
        """
        tails = self.kept[STATIC.index("read_offsets")]
        for req, slot in zip(reqs, slots.tolist(), strict=True):
            if self.unsupported[slot]:
                continue
            _, _, token, logprob, opened = self.cursors[slot].tolist()
            req.send_token_offset, req.send_output_token_logprobs_offset = token, logprob
            req.send_decode_id_offset = tails[slot] + token if opened else 0

    def reload(self, reqs: Sequence[Any], slots: NDArray[np.int32]) -> None:
        """Take the cursors from the requests' own fields, after the engine's streamer moved them."""
        for req, slot in zip(reqs, slots.tolist(), strict=True):
            self.cursors[slot, C.TOKEN_CURSOR :] = _cursors_of(req)
            self.prefill_known[slot] = False
            self.input_logprobs_sent[slot] = _input_logprobs_sent(req)
        self._membership.prefill_known = self._membership.input_logprobs_sent = False

    def _admit(self, req: Any) -> int:
        if not self._free:
            self._grow()
        slot, key = self._free.pop(), id(req)
        params = req.sampling_params
        self.cursors[slot] = (
            L.STATE_STREAM * bool(req.stream)
            | L.STATE_LOGPROBS * bool(req.return_logprob)
            | C.ASK_HOLD * bool(params.stop_strs),
            (params.stream_interval or 0) if req.stream else 0,
            *_cursors_of(req),
        )
        static = (
            req.rid,
            req.http_worker_ipc,
            req.decoded_text,
            min(len(req.origin_input_ids_unpadded), PROMPT_TAIL),
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
            params.no_stop_trim,
        )
        for index, value in enumerate(static):
            self.kept[index, slot] = value
        self.prefill_known[slot] = False
        self.input_logprobs_sent[slot] = _input_logprobs_sent(req)
        self.generation[slot] += 1
        self.wanted[slot] = sum(1 << i for i, name in enumerate(WANTED) if getattr(req, name))
        log = req.logprob
        self.widths[slot] = (log.top_logprobs_num or 0, len(log.token_ids_logprob or ())) if req.return_logprob else 0
        self.why[slot] = why_unsupported(req)
        self.unsupported[slot] = self.why[slot] is not None
        self._slot_of[key] = slot
        self._references[slot] = weakref.ref(req, partial(self._left, key, slot))
        return slot

    def _left(self, key: int, slot: int, reference: Any) -> None:
        del self._slot_of[key]
        self._references[slot] = None
        self._free.append(slot)

    def _grow(self) -> None:
        old = len(self.prefill_known)
        self.cursors = np.concatenate([self.cursors, np.zeros_like(self.cursors)])
        self.kept = np.concatenate([self.kept, np.full_like(self.kept, None)], axis=1)
        for name in ("prefill_known", "wanted", "unsupported", "generation", "widths", "input_logprobs_sent"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.why += [None] * old
        self._references += [None] * old
        self._free += range(2 * old - 1, old - 1, -1)


def _cursors_of(req: Any) -> tuple[int, int, bool]:
    """Token cursor, logprob cursor, whether a row has gone out."""
    return req.send_token_offset, req.send_output_token_logprobs_offset, req.send_decode_id_offset > 0


def _input_logprobs_sent(req: Any) -> bool:
    """Whether a request's input logprobs have been sent, or will not be."""
    return bool(req.input_logprob_sent or not req.return_logprob)
