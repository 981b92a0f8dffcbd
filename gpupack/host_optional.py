"""HostOptional: top-k and token-ids logprobs and speculative lens of a step on the host, as the loop takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack.checks import check_rows, host_array
from gpupack.config import PackerConfig
from gpupack.errors import InputError
from gpupack.inputs import StepInputs
from gpupack.loop_optional import IDS_STRIDE, IDS_WIDTH, RING_STRIDE, TOP_STRIDE, TOP_WIDTH
from gpupack.state import HostArenas

NOTHING = np.empty(0, np.int32)
ANY_WIDTH = 1 << 30
ANY_LENGTH = 1 << 30

Int32 = NDArray[np.int32]


class OptionalInputs(NamedTuple):
    """The optional of one step; all int32 and flat, values as bit patterns.

    `top_width` and `ids_width` say how many there are for each position, `positions` for how many
    positions of a row, `top_stride` and `ids_stride` the words from one row to the next. Whole records, joined
    in `top_val`, begin at `record_starts`.
    """

    top_val: Int32 = NOTHING
    top_idx: Int32 = NOTHING
    ids_val: Int32 = NOTHING
    top_width: int = 0
    ids_width: int = 0
    top_stride: int = 0
    ids_stride: int = 0
    positions: int = ANY_LENGTH
    record_starts: Int32 = NOTHING
    block_accept_lens: Int32 = NOTHING
    cap_lens: Int32 = NOTHING


NO_OPTIONAL = OptionalInputs()


class HostOptional:
    """Checks the optional of a step and makes the loop's `optional` of them, with the arenas."""

    def __init__(self, config: PackerConfig, arenas: HostArenas) -> None:
        self.config = config
        self._arenas = arenas
        self._top_idx = NOTHING  # ids of 64 bits, in 32; made when first needed
        self._strides = np.zeros(5, np.int64)
        self._strides[RING_STRIDE] = max(config.family_width, 1)

    def dense(self, inputs: StepInputs, batch: int) -> OptionalInputs:
        """The optional of dense inputs; InputError if one is of the wrong kind."""
        optional = NO_OPTIONAL
        top_val, top_idx = inputs.top_logprobs_val, inputs.top_logprobs_idx
        if (top_val is None) != (top_idx is None):
            raise InputError("top_logprobs_val, top_logprobs_idx: expected both or none, got one")
        if self.config.max_top_logprobs and top_val is not None:
            values = self._positions("top_logprobs_val", top_val, (np.float32,), batch)
            ids = self._positions("top_logprobs_idx", top_idx, (np.int32, np.int64), batch)
            if ids.shape != values.shape:
                raise InputError(f"top_logprobs_idx: expected shape {values.shape}, got {ids.shape}")
            optional = optional._replace(
                top_val=values.reshape(-1).view(np.int32),
                top_idx=self._in_32_bits(ids.reshape(-1)),
                top_width=values.shape[2],
                top_stride=values.shape[1] * values.shape[2],
                positions=values.shape[1],
            )
        if self.config.max_token_ids_logprobs and inputs.token_ids_logprobs_val is not None:
            values = self._positions("token_ids_logprobs_val", inputs.token_ids_logprobs_val, (np.float32,), batch)
            optional = optional._replace(
                ids_val=values.reshape(-1).view(np.int32),
                ids_width=values.shape[2],
                ids_stride=values.shape[1] * values.shape[2],
                positions=min(optional.positions, values.shape[1]),
            )
        if self.config.speculative:
            optional = optional._replace(
                block_accept_lens=self._lens("block_accept_lens", inputs.block_accept_lens, batch),
                cap_lens=self._lens("cap_lens", inputs.cap_lens, batch),
            )
        return optional

    def arrays(self, optional: OptionalInputs) -> tuple[Any, ...]:
        """The tuple of `loop_optional.OPTIONAL`."""
        strides = self._strides
        strides[TOP_STRIDE], strides[TOP_WIDTH] = optional.top_stride, optional.top_width
        strides[IDS_STRIDE], strides[IDS_WIDTH] = optional.ids_stride, optional.ids_width
        arenas = self._arenas
        return (
            arenas.family_ring, arenas.spec, optional.top_val, optional.top_idx, optional.ids_val,
            optional.block_accept_lens, optional.cap_lens, optional.record_starts, strides,
        )  # fmt: skip

    @staticmethod
    def _positions(name: str, value: Any, dtypes: tuple[type[np.generic], ...], batch: int) -> NDArray[Any]:
        """An input of one or several positions a row, `[B, S, K]`."""
        array = host_array(name, value, dtypes, (2, 3))
        check_rows(name, array, batch)
        return array if array.ndim == 3 else array[:, None, :]

    @staticmethod
    def _lens(name: str, value: Any, batch: int) -> Int32:
        if value is None:
            return NOTHING
        array = host_array(name, value, (np.int32, np.int64), (1,))
        check_rows(name, array, batch)
        if array.dtype == np.int64:  # clipped, so that no bad length wraps to a good one
            array = np.clip(array, -1, np.iinfo(np.int32).max).astype(np.int32)
        return array

    def _in_32_bits(self, ids: NDArray[Any]) -> Int32:
        if ids.dtype == np.int32:
            return ids
        if len(self._top_idx) < len(ids):
            self._top_idx = np.empty(2 * len(ids), np.int32)
        np.copyto(self._top_idx[: len(ids)], ids, casting="unsafe")  # ids of the vocabulary
        return self._top_idx[: len(ids)]
