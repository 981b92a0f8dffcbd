"""The CPU backend: arenas and packed steps in host memory, the loop of `loop.py` over them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.cpu import input_checks as check
from gpupack.backends.cpu import pack_loop as loop
from gpupack.backends.cpu.extra_inputs import NO_OPTIONAL, HostOptional, OptionalInputs
from gpupack.backends.slot_state import HostArenas
from gpupack.core import layout as L
from gpupack.core.array_checks import check_rows, host_array
from gpupack.core.config import PackerConfig
from gpupack.core.errors import BufferBusyError, InputError
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Resume
from gpupack.core.row_control import NO_CONTROL
from gpupack.core.step_inputs import StepInputs

LEAST_RUN = 8  # rows; a shorter run is packed faster a row at a time
_NOTHING = np.empty(0, np.int32)
_NO_SPAN: AbstractContextManager[object] = nullcontext()

_CAUSES = {
    check.BAD_ACCEPT_LEN: "accept_lens: expected 0 to {max_accept}, got {accept}",
    check.DOUBLED: "handles: expected each handle once, got {handle} again",
    check.BAD_CONTROL: "control.flags: expected known bits and not HOLD with FLUSH, got {flags}",
    check.BAD_FINISH_CODE: "control.finish_code: expected 1 to 5 with FINISH, got {code}",
    check.BAD_FINISHED_LEN: "control.finished_len: expected -1 to the output length {new_len}, got {finished_len}",
    check.BAD_VISIBLE_LEN: "control.visible_len: expected -1 or within {limit} tokens of {new_len}, got {visible_len}",
    check.NO_LOGPROBS: "logprobs: expected, the request of handle {handle} asked for them, got None",
    check.NO_TOP_LOGPROBS: "top_logprobs_val: expected as many as handle {handle} asked for, got {top}",
    check.NO_IDS_LOGPROBS: "token_ids_logprobs_val: expected as many as handle {handle} asked for, got {ids}",
    check.BAD_BLOCK_LEN: "block_accept_lens: expected at least 0, got {block}",
    check.BAD_CAP_LEN: "cap_lens: expected 0 to {most}, got {cap}",
}


@lru_cache(maxsize=256)
def _dense_starts(batch: int, stride: int) -> NDArray[np.int32]:
    """Where the items of each row of a dense `[batch, stride]` array start."""
    if batch * stride >= 2**31:
        raise InputError(f"handles: expected fewer than 2**31 items in an input, got {batch} rows of {stride}")
    return np.arange(batch, dtype=np.int32) * np.int32(stride)


class _Sized(NamedTuple):
    """What of a step depends on the number of its rows alone."""

    geometry: L.PackedLayout
    places: tuple[int, ...]  # `compiled.PLACES`
    ones: NDArray[np.int32]  # one token each
    kinds: NDArray[np.uint8]  # room for `loop_runs`


class CpuBackend:
    """Packs steps on the host; every call has finished when it returns. One thread owns it."""

    def __init__(self, config: PackerConfig) -> None:
        self.config = config
        # Read once: a property at each step costs as much as a dozen rows.
        self._shape, self._spec_width = config.packed_shape, config.spec_width
        self._most_rows, self._max_accept = config.batch_capacity, config.max_accept
        self.arenas = HostArenas(config)
        self.buffer_words = self.layout(config.batch_capacity).size
        self._free = [np.empty(self.buffer_words, np.int32) for _ in range(config.buffers)]
        self._limits = np.zeros(check.LIMITS, np.int64)
        self._limits[[check.LIMIT_POLICY, check.LIMIT_VOCAB]] = config.policy.bits, config.vocab_size
        self._limits[[check.LIMIT_BACKLOG, check.LIMIT_FAMILIES]] = config.backlog_limit, config.family_limit
        self._limits[[check.LIMIT_CAP, check.LIMIT_RUN]] = config.max_accept, LEAST_RUN
        self._seen = np.zeros(config.capacity, np.int64)
        self._kinds = np.empty(config.batch_capacity, np.uint8)
        self._ones = np.ones(config.batch_capacity, np.int32)
        self._sized: dict[int, _Sized] = {}  # by rows, at most one for each size of a batch
        self._launch = 0
        self._checks = 0  # marks a slot as seen in this batch; refused calls count here, not as launches
        self._optional = HostOptional(config, self.arenas) if config.family_width or config.speculative else None
        self._prepared: tuple[Any, StepInputs, NDArray[np.int32] | None, int] | None = None
        self._step = loop.step_batch
        if self._optional is not None:
            from gpupack.backends.cpu.pack_loop_extra import step_batch_with_optional

            self._step = step_batch_with_optional

    def install(self, slots: NDArray[np.int64], rows: NDArray[np.int32], resumes: Sequence[Resume]) -> None:
        """Begin handles; see HostArenas.install."""
        self.arenas.install(slots, rows, resumes)

    def end(self, slots: NDArray[np.int64]) -> None:
        """End handles; see HostArenas.end."""
        self.arenas.end(slots)

    def state_row(self, slot: int) -> NDArray[np.int32]:
        """Copy of a slot's state, int32 `[STATE_WIDTH]`."""
        return self.arenas.state[slot].copy()

    def spec_row(self, slot: int) -> NDArray[np.int32]:
        """Copy of a slot's speculative counters, int32 `[spec_width]`."""
        return self.arenas.spec[slot].copy()

    def unsent(self, slot: int, begin: int, end: int, channel: int = L.CHANNEL_TOKENS) -> NDArray[np.int32]:
        """Copy of ring items; see HostArenas.unsent."""
        return self.arenas.unsent(slot, begin, end, channel)

    def step(self, handles: Any, inputs: StepInputs, control: NDArray[np.int32] | None, mode: int) -> PackedStep:
        """Dense inputs: token_ids `[B]` or `[B, T]`, logprobs `[B]` or `[B, S]`; see Packer.step."""
        if self._prepared is not None:
            raise InputError("step: expected commit_launch() after prepare_launch() first, got a step")
        handles = host_array("handles", handles, (np.int64,), (1,))
        batch = handles.shape[0]
        if inputs.token_ids is None:
            return self.step_ragged(handles, None, _NOTHING, _dense_starts(batch, 0), None, None, control, mode)
        token_ids = host_array("token_ids", inputs.token_ids, (np.int64, np.int32), (1, 2))
        check_rows("token_ids", token_ids, batch)
        width = token_ids.shape[1] if token_ids.ndim == 2 else 1
        accept_lens = inputs.accept_lens
        if accept_lens is not None:
            accept_lens = host_array("accept_lens", accept_lens, (np.int32, np.int64), (1,))
            check_rows("accept_lens", accept_lens, batch)
            if accept_lens.dtype == np.int64:  # clipped, so that no bad length wraps to a good one
                accept_lens = np.clip(accept_lens, -1, np.iinfo(np.int32).max).astype(np.int32)
        logprobs, score_starts = inputs.logprobs, None
        if logprobs is not None:
            logprobs = host_array("logprobs", logprobs, (np.float32,), (1, 2))
            check_rows("logprobs", logprobs, batch)
            score_width = logprobs.shape[1] if logprobs.ndim == 2 else 1
            width = min(width, score_width)
            logprobs, score_starts = logprobs.reshape(-1), _dense_starts(batch, score_width)
        optional = NO_OPTIONAL
        if self._optional is not None:
            optional = self._optional.dense(inputs, batch)
            width = min(width, optional.positions)
        starts = _dense_starts(batch, token_ids.shape[1] if token_ids.ndim == 2 else 1)
        return self.step_ragged(
            handles, accept_lens, token_ids.reshape(-1), starts, logprobs, score_starts, control, mode, width, optional
        )

    def span(self, name: str) -> AbstractContextManager[object]:
        """Nothing: what runs on the CPU is seen by its profilers."""
        return _NO_SPAN

    def prepare(self, handles: Any, inputs: StepInputs, control: NDArray[np.int32] | None, mode: int) -> None:
        """Remember a step; it is done at `commit`, when the sampler has written its inputs."""
        if self._prepared is not None:
            raise InputError("prepare_launch: expected commit_launch() after the one before, got another")
        handles = host_array("handles", handles, (np.int64,), (1,))
        if inputs.token_ids is not None:
            check_rows("token_ids", inputs.token_ids, len(handles))
        if control is not None:
            if control.shape[1] != len(handles):
                raise InputError(f"control: expected {len(handles)} rows, one for each handle, got {control.shape[1]}")
            control = control.copy()
        self._prepared = (handles.copy(), inputs, control, mode)

    def enqueue(self, batch_capacity: int) -> None:
        """Nothing, as there is no stream, but InputError if more rows were prepared."""
        if self._prepared is not None and len(self._prepared[0]) > batch_capacity:
            rows = len(self._prepared[0])
            raise InputError(f"batch_capacity: expected at least the {rows} rows prepared, got {batch_capacity}")

    def close(self) -> None:
        """Nothing is under way."""

    def commit(self) -> PackedStep:
        """Do the step that was prepared."""
        assert self._prepared is not None, "the packer prepares before it commits"
        prepared, self._prepared = self._prepared, None
        return self.step(*prepared)

    def step_ragged(
        self,
        handles: NDArray[np.int64],
        accept_lens: NDArray[np.int32] | None,
        token_ids: NDArray[Any],
        token_starts: NDArray[np.int32],
        logprobs: NDArray[np.float32] | None,
        logprob_starts: NDArray[np.int32] | None,
        control: NDArray[np.int32] | None,
        mode: int,
        width: int | None = None,
        optional: OptionalInputs = NO_OPTIONAL,
    ) -> PackedStep:
        """Runs given by start and length; `width` bounds the lengths beside `max_accept`."""
        batch = handles.shape[0]
        if batch > self._most_rows:
            raise InputError(f"handles: expected at most max_batch = {self._most_rows} rows, got {batch}")
        if control is None:
            control = NO_CONTROL
        elif control.shape[1] != batch:
            raise InputError(f"control: expected {batch} rows, one for each handle, got {control.shape[1]}")
        sized = self._sized.get(batch) or self._size(batch)
        if accept_lens is None:
            accept_lens = sized.ones
        scores = _NOTHING if logprobs is None else logprobs.view(np.int32)
        score_starts = token_starts if logprob_starts is None else logprob_starts
        max_accept = self._max_accept if width is None else min(width, self._max_accept)
        if not self._free:
            raise BufferBusyError(f"step: all {self.config.buffers} packed steps are in use; release an earlier one")
        out = self._free.pop()
        arrays = None if self._optional is None else self._optional.arrays(optional)
        arenas = self.arenas
        self._checks += 1
        cause, row = self._step(
            arenas.state, arenas.token_ring, arenas.logprob_ring, arrays, handles, accept_lens, token_ids, token_starts,
            scores, score_starts, control, out, sized.places, self._limits, mode, self._launch + 1, sized.kinds,
            self._seen, self._checks, max_accept, logprobs is not None,
        )  # fmt: skip
        if cause != check.OK:
            self._free.append(out)
            raise self._input_error(cause, row, handles, accept_lens, control, max_accept, mode, optional)
        self._launch += 1
        with_logprobs = self._shape.logprobs and bool(mode & L.MODE_LOGPROBS or out[L.H_LOGPROBS])
        return PackedStep(out, sized.geometry, with_logprobs, self._free.append, spec_width=self._spec_width)

    def _size(self, batch: int) -> _Sized:
        """Note down what steps of `batch` rows have in common."""
        geometry = self.layout(batch)
        sized = self._sized[batch] = _Sized(geometry, geometry[:4], self._ones[:batch], self._kinds[:batch])
        return sized

    def layout(self, batch: int) -> L.PackedLayout:
        """Where the sections of a packed step of `batch` rows lie."""
        return L.packed_layout(batch, self._shape)

    def _input_error(
        self,
        cause: int,
        row: int,
        handles: NDArray[np.int64],
        accept_lens: NDArray[np.int32],
        control: NDArray[np.int32],
        max_accept: int,
        mode: int,
        optional: OptionalInputs,
    ) -> InputError:
        handle = int(handles[row])
        accept = int(accept_lens[row]) if mode & L.MODE_APPEND else 0
        asked = control[:, row].tolist() if control.shape[1] else [0] * L.CONTROL_WIDTH
        text = _CAUSES[cause].format(
            max_accept=max_accept,
            accept=accept,
            handle=handle,
            flags=asked[L.CONTROL_FLAGS_ROW],
            code=asked[L.CONTROL_FINISH_CODE],
            finished_len=asked[L.CONTROL_FINISHED_LEN],
            visible_len=asked[L.CONTROL_VISIBLE_LEN],
            limit=self.config.visible_limit,
            new_len=int(self.arenas.state[handle & 0xFFFFFFFF, L.OUTPUT_LEN]) + accept,
            top=optional.widths[0],
            ids=optional.widths[1],
            block=optional.block_accept_lens[row] if len(optional.block_accept_lens) else 0,
            cap=optional.cap_lens[row] if len(optional.cap_lens) else 0,
            most=self.config.max_accept,
        )
        return InputError(f"{text} (row {row})")
