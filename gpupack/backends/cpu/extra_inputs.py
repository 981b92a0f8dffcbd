"""HostOptional: top-k and token-ids logprobs and speculative lens of a step on the host, as the loop takes them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.cpu.extra_logprobs import (
    IDS_STRIDE,
    IDS_WIDTH,
    IDX_STEP,
    RING_STRIDE,
    STRIDES_WIDTH,
    TOP_STRIDE,
    TOP_WIDTH,
)
from gpupack.backends.slot_state import HostArenas
from gpupack.core import layout as L
from gpupack.core.array_checks import check_rows, host_array
from gpupack.core.config import PackerConfig
from gpupack.core.errors import InputError
from gpupack.core.step_inputs import StepInputs

NOTHING = np.empty(0, np.int32)
NO_STRIDES = np.empty(0, np.int64)
ANY_WIDTH = 1 << 30
ANY_LENGTH = 1 << 30

Int32 = NDArray[np.int32]
Strides = NDArray[np.int64]


class OptionalInputs(NamedTuple):
    """The optional of one step; all int32 and flat, values as bit patterns.

    `strides` is that of `loop_optional`, empty where there are neither top nor token-ids logprobs; `positions` says how
    many positions of a row there are. Whole records, joined in `top_val`, begin at `record_starts`.
    """

    top_val: Int32 = NOTHING
    top_idx: Int32 = NOTHING
    ids_val: Int32 = NOTHING
    strides: Strides = NO_STRIDES
    positions: int = ANY_LENGTH
    record_starts: Int32 = NOTHING
    block_accept_lens: Int32 = NOTHING
    cap_lens: Int32 = NOTHING

    @property
    def widths(self) -> tuple[int, int]:
        """How many top and token-ids logprobs there are for a position."""
        return (int(self.strides[TOP_WIDTH]), int(self.strides[IDS_WIDTH])) if len(self.strides) else (0, 0)


NO_OPTIONAL = OptionalInputs()


@lru_cache(maxsize=256)
def strides_of(record: int, top: int = 0, ids: int = 0, step: int = 1, top_row: int = 0, ids_row: int = 0) -> Strides:
    """`loop_optional`'s `strides` for records of `record` words in the ring.

    Of the inputs, `top` and `ids` say how many logprobs a position has, `top_row` and `ids_row` how many a row;
    `step` is the words of an id.
    """
    strides = np.zeros(STRIDES_WIDTH, np.int64)
    strides[[TOP_STRIDE, TOP_WIDTH, IDS_STRIDE, IDS_WIDTH]] = top_row, top, ids_row, ids
    strides[[RING_STRIDE, IDX_STEP]] = record, step
    return strides


class HostOptional:
    """Checks the optional of a step and makes the loop's `optional` of them, with the arenas."""

    def __init__(self, config: PackerConfig, arenas: HostArenas) -> None:
        self._takes_top, self._takes_ids = config.max_top_logprobs > 0, config.max_token_ids_logprobs > 0
        self._speculative = config.speculative
        self._record = max(config.family_width, 1)
        self._arenas = arenas

    def dense(self, inputs: StepInputs, batch: int) -> OptionalInputs:
        """The optional of dense inputs; InputError if one is of the wrong kind."""
        top_val, top_idx, ids_val = inputs.top_logprobs_val, inputs.top_logprobs_idx, inputs.token_ids_logprobs_val
        if (top_val is None) != (top_idx is None):
            raise InputError("top_logprobs_val, top_logprobs_idx: expected both or none, got one")
        top_words = idx_words = ids_words = NOTHING
        top = ids = top_row = ids_row = 0
        positions, step = ANY_LENGTH, 1
        if self._takes_top and top_val is not None:
            values = host_array("top_logprobs_val", top_val, (np.float32,), (2, 3))
            indices = host_array("top_logprobs_idx", top_idx, (np.int32, np.int64), (2, 3))
            check_rows("top_logprobs_val", values, batch)
            if indices.shape != values.shape:
                raise InputError(f"top_logprobs_idx: expected shape {values.shape}, got {indices.shape}")
            positions, top, step = _positions(values), values.shape[-1], indices.itemsize // L.WORD
            top_row = positions * top
            top_words, idx_words = _words(values), _words(indices)
        if self._takes_ids and ids_val is not None:
            scores = host_array("token_ids_logprobs_val", ids_val, (np.float32,), (2, 3))
            check_rows("token_ids_logprobs_val", scores, batch)
            ids, ids_row = scores.shape[-1], _positions(scores) * scores.shape[-1]
            positions = min(positions, _positions(scores))
            ids_words = _words(scores)
        block = cap = NOTHING
        if self._speculative:
            block = self._lens("block_accept_lens", inputs.block_accept_lens, batch)
            cap = self._lens("cap_lens", inputs.cap_lens, batch)
        strides = strides_of(self._record, top, ids, step, top_row, ids_row) if top or ids else NO_STRIDES
        return OptionalInputs(top_words, idx_words, ids_words, strides, positions, NOTHING, block, cap)

    def arrays(self, optional: OptionalInputs) -> tuple[Any, ...]:
        """The tuple of `loop_optional.OPTIONAL`."""
        strides = optional.strides if len(optional.strides) else strides_of(self._record)
        return (
            self._arenas.family_ring, self._arenas.spec, optional.top_val, optional.top_idx, optional.ids_val,
            optional.block_accept_lens, optional.cap_lens, optional.record_starts, strides,
        )  # fmt: skip

    @staticmethod
    def _lens(name: str, value: Any, batch: int) -> Int32:
        if value is None:
            return NOTHING
        array = host_array(name, value, (np.int32, np.int64), (1,))
        check_rows(name, array, batch)
        if array.dtype == np.int64:  # clipped, so that no bad length wraps to a good one
            array = np.clip(array, -1, np.iinfo(np.int32).max).astype(np.int32)
        return array


def _positions(array: NDArray[Any]) -> int:
    """Positions a row of an input `[B, S, K]`, or `[B, K]` for one."""
    return array.shape[1] if array.ndim == 3 else 1


def _words(array: NDArray[Any]) -> Int32:
    """An array as the words of its items, flat; of a wide one the low word comes first."""
    return array.reshape(-1).view(np.int32)
