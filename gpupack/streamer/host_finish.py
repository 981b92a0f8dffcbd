"""Gate: length, cursors, hold and backlog of host-judged requests, kept by a CPU backend on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.cpu.backend import CpuBackend
from gpupack.backends.cpu.extra_inputs import ANY_WIDTH, NO_OPTIONAL, NOTHING, OptionalInputs, strides_of
from gpupack.backends.slot_state import state_rows
from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import InputError
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Request, Resume
from gpupack.core.row_control import Control
from gpupack.streamer.join import join_rows
from gpupack.streamer.passthrough import Conveyed


class Gate:
    """The CPU backend over conveyed rows, with the host's decisions as control (DESIGN.md section 2)."""

    def __init__(self, config: PackerConfig) -> None:
        self.config = replace(config, device="cpu")
        self._backend = CpuBackend(self.config)
        self._any_width = strides_of(max(config.family_width, 1), ANY_WIDTH, ANY_WIDTH)  # whole records bring theirs
        self._joined: NDArray[np.int32] | None = None

    def admit(
        self,
        handles: NDArray[np.int64],
        requests: Sequence[Request],
        resumes: Sequence[Resume],
    ) -> None:
        """Begin host-judged requests under the handles that the packer gave them.

        The gate finds invalid ids, stop ids and the length of requests that the streamer's judge
        looks after; the engine finds everything of its own.
        """
        judged = [request.judged_by(self.config.eos_token_ids) == "host" for request in requests]
        nothing = [False] * len(requests)
        rows = state_rows(handles, requests, resumes, self.config, conveyed=nothing, judged=judged)
        self._backend.install(handles & 0xFFFFFFFF, rows, resumes)

    def end(self, slots: NDArray[np.int64]) -> None:
        """End the handles of these slots."""
        self._backend.end(slots)

    def retract(self, slot: int, output_len: int | None = None) -> Resume:
        """Where the request of a slot stands, from results already taken in; the caller ends the handle.

        InputError if it has finished, or if `output_len` says something else than was taken in.
        """
        state = self._backend.state_row(slot)
        length, tokens, scores = (int(state[f]) for f in (L.OUTPUT_LEN, L.TOKEN_CURSOR, L.LOGPROB_CURSOR))
        if state[L.FLAGS] & L.STATE_FINAL_SENT:
            raise InputError(
                f"handle: expected a running request, that of slot {slot} has sent its final row; retire it"
            )
        if state[L.FLAGS] & L.STATE_FINISHED:
            raise InputError(
                f"handle: expected a running request, that of slot {slot} has finished; pack sends its row"
            )
        if output_len not in (None, length):
            raise InputError(f"output_len: expected the {length} tokens taken in, got {output_len}")
        with_scores = bool(state[L.FLAGS] & L.STATE_LOGPROBS)
        end = length if with_scores else scores
        return Resume(
            output_len=length,
            token_cursor=tokens,
            logprob_cursor=scores,
            unsent_tokens=self._backend.unsent(slot, tokens, length),
            unsent_logprobs=self._backend.unsent(slot, scores, end, L.CHANNEL_LOGPROBS).view(np.float32),
            unsent_families=self._backend.unsent(slot, scores, end, L.CHANNEL_FAMILIES),
            spec_counts=self._backend.spec_row(slot),
        )

    def finished(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether the finish of these slots is known, bool `[n]`."""
        return (self._backend.arenas.state[slots, L.FLAGS] & L.STATE_FINISHED) != 0

    def fit(self, conveyed: Conveyed, control: Control, mode: int) -> None:
        """Fit the engine's control to what was taken in, which it could not know when it launched the step.

        An end beyond the output is the output's end; output that is kept back past the window is shown.
        """
        state = self._backend.arenas.state
        accepted = conveyed.accept_lens if mode & L.MODE_APPEND else 0
        new_len = state[conveyed.slots, L.OUTPUT_LEN] + accepted
        np.minimum(control.finished_len, new_len, out=control.finished_len)
        visible = control.visible_len
        kept = visible >= 0
        visible[kept] = np.maximum(visible, new_len - self.config.visible_limit)[kept]

    def pack(self, conveyed: Conveyed, control: Control | None, mode: int) -> PackedStep:
        """Run the rule over the conveyed rows; rows in batch order, with the batch's own indices."""
        packed = conveyed.packed
        gated = self._backend.step_ragged(
            conveyed.handles,
            conveyed.accept_lens,
            packed.token_ids,
            conveyed.starts,
            packed.logprobs if self.config.logprobs else None,
            conveyed.logprob_starts,
            None if control is None else control.words,
            mode,
            optional=self._optional(conveyed, mode),
        )
        if len(conveyed.rows) < packed.header(L.H_BATCH):
            index = gated.column(L.R_BATCH_INDEX)
            index[:] = conveyed.batch_rows[index]
        return gated

    def _optional(self, conveyed: Conveyed, mode: int) -> OptionalInputs:
        """What conveyed rows carry beside tokens and logprobs: whole records, and lens in their counters' places."""
        config, packed = self.config, conveyed.packed
        if not (config.family_width or config.speculative):
            return NO_OPTIONAL
        block = cap = NOTHING
        if config.speculative and mode & L.MODE_VERIFY:
            block = packed.spec(L.SPEC_BLOCK_ACCEPT)[conveyed.rows]
            cap = packed.spec(L.SPEC_CAP_TOKENS)[conveyed.rows] if mode & L.MODE_CAP_LENS else NOTHING
        return OptionalInputs(
            top_val=packed.families,
            strides=self._any_width,
            record_starts=conveyed.record_starts,
            block_accept_lens=block,
            cap_lens=cap,
        )

    def join(self, packed: PackedStep, gated: PackedStep, mode: int) -> PackedStep:
        """The rows of both in batch order; valid until the next call, and to be released like any other."""
        if self._joined is None:
            self._joined = np.empty(self._backend.buffer_words, np.int32)
        layout = self._backend.layout(packed.header(L.H_BATCH))
        sections = (packed.geometry, gated.geometry, layout)
        places = [(at.row_stride, at.tokens, at.logprobs, at.families) for at in sections]
        spec_width = self.config.spec_width
        join_rows(packed.buffer, places[0], gated.buffer, places[1], self._joined, places[2], spec_width)
        with_logprobs = self.config.logprobs and bool(mode & L.MODE_LOGPROBS or self._joined[L.H_LOGPROBS])
        return PackedStep(self._joined, layout, with_logprobs, spec_width=spec_width)
