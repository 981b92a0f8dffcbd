"""Packer: admit, step, append, pack, retract, retire, close; one backend behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.backend import Backend, Launched
from gpupack.checks import host_array
from gpupack.config import PackerConfig
from gpupack.control import Control
from gpupack.errors import ClosedError, InputError, StepFailedError
from gpupack.inputs import NO_INPUTS, StepInputs
from gpupack.packed import PackedStep
from gpupack.request import FinishReason, Request, Resume
from gpupack.slots import SlotTable
from gpupack.state import check_admission, family_width, state_rows


def make_backend(config: PackerConfig) -> Backend:
    """The backend for `config.device`. It loads Numba or Triton, so not before a packer is made."""
    if config.device == "cpu":
        from gpupack.backend_cpu import CpuBackend

        return CpuBackend(config)
    from gpupack.backend_triton import TritonBackend

    return TritonBackend(config)


def _inside(state: NDArray[np.int32]) -> int:
    """1 if what ended the output is its last token; an invalid id is not part of it."""
    return int((int(state[L.FLAGS]) >> L.CODE_SHIFT) & L.CODE_MASK != L.FINISH_INVALID_TOKEN)


class Ticket:
    """A launched step: `wait()` gives its PackedStep. Steps are taken in, in the order of their launch."""

    __slots__ = ("_packer", "control", "endings", "handles", "launched", "mode", "reasons")

    def __init__(self, packer: Packer, launched: Launched, control: Control | None, mode: int) -> None:
        self._packer = packer
        self.launched = launched
        # The caller may use its Control again before this step is taken in.
        self.control = None if control is None else control.words.copy()
        self.mode = mode
        self.reasons: dict[int, FinishReason] = {}  # by handle: why the host ends requests with this step
        self.endings = packer.endings
        self.handles: NDArray[np.int64] | None = None  # of the batch, a copy, if the packer keeps them

    def ready(self) -> bool:
        """Whether `wait()` would return at once; does not block. Always so on the CPU."""
        return self.launched.ready()

    def wait(self) -> PackedStep:
        """The packed step; blocks until the launch has been done.

        Rows of handles that ended since the launch are dropped and counted. StepFailedError if the
        step went wrong; the packer is closed then.
        """
        return self._packer._take_in(self)


class Packer:
    """Per-request offsets and unsent output; decides who sends and packs what they send.

    With `convey` (the default) host-judged requests are passed on for the streamer's gate. Without
    it they keep their cursors here and only `control` ends or holds them: for engines that decide
    everything on the host. One thread owns a packer. On the CPU nothing is asynchronous.
    """

    def __init__(self, config: PackerConfig, *, convey: bool = True) -> None:
        self.config = config
        self.slots = SlotTable(config.capacity)
        self.backend = make_backend(config)
        self.convey = convey
        self.keep_handles = False  # the streamer needs to know who is in a batch
        self.endings = 0
        self.dropped_rows = 0
        self._in_flight: deque[Ticket] = deque()
        self._closed = False

    # --- life of a handle -------------------------------------------------------------------------

    def admit(self, requests: Sequence[Request], resume: Sequence[Resume | None] | None = None) -> NDArray[np.int64]:
        """Begin requests; returns their handles, int64 `[n]`.

        `resume[i]`, if not None, says where a retracted request goes on. CapacityError if slots
        lack, InputError for a bad request; then nothing was admitted.
        """
        self._check_open()
        if resume is not None and len(resume) != len(requests):
            raise InputError(f"resume: expected {len(requests)} entries, one for each request, got {len(resume)}")
        resumes = [entry or Resume() for entry in resume or [None] * len(requests)]
        on_host = [request.judged_by(self.config.eos_token_ids) != "device" for request in requests]
        check_admission(requests, resumes, self.config)
        handles = self.slots.take(requests)
        rows = state_rows(
            handles,
            requests,
            resumes,
            self.config,
            conveyed=[self.convey and host for host in on_host],
            judged=[not host for host in on_host],
        )
        self.backend.install(handles & 0xFFFFFFFF, rows, resumes)
        return handles

    def retire(self, handles: Any) -> None:
        """End handles, int64 `[n]`, in stream order; rows still in flight for them become stale.

        HandleError, and no change, if one is not live.
        """
        self._check_open()
        slots = self.slots.end(host_array("handles", handles, (np.int64,), (1,)))
        if len(slots):
            self.backend.end(slots)
            self.endings += 1

    def begin_again(self, slots: NDArray[np.int64]) -> None:
        """Begin live slots, int64 `[n]`, anew under their handles, as requests of which nothing was sent or decided.

        Rows of theirs in flight stay as they are.
        """
        self._check_open()
        requests = [request for request in map(self.slots.requests.__getitem__, slots.tolist()) if request is not None]
        resumes, nothing = [Resume()] * len(slots), [False] * len(slots)
        handles = self.slots.generations[slots] << L.SLOT_BITS | slots
        rows = state_rows(handles, requests, resumes, self.config, conveyed=nothing, judged=nothing)
        if len(slots):
            self.backend.install(slots, rows, resumes)

    def retract(self, handle: int, *, output_len: int | None = None) -> Resume:
        """End a handle whose request will come back, and say where it stands.

        With steps in flight `output_len` says how many tokens the host has committed, from results
        already taken in; later ones are discarded and their rows dropped. Without it all launched
        steps must have been taken in. A host-judged request keeps its cursors in the streamer's gate:
        there use `OutputStreamer.retract`.
        """
        self._check_open()
        slot = int(self.slots.slots_of(np.array([handle], np.int64))[0])
        state = self.backend.state_row(slot)
        if state[L.FLAGS] & L.STATE_CONVEYED:
            raise InputError(f"handle: {handle} is host-judged, its cursors are the gate's: OutputStreamer.retract")
        launched_len = int(state[L.OUTPUT_LEN])
        if output_len is None:
            if self._in_flight:
                raise InputError(f"output_len: expected, {len(self._in_flight)} steps are in flight, got None")
            output_len = launched_len
        rows = self._rows_in_flight(handle)
        tokens, scores = (int(state[L.TOKEN_CURSOR]), int(state[L.LOGPROB_CURSOR]))
        if rows:
            packed, row = rows[0]
            tokens, scores = (int(packed.column(field)[row]) for field in (L.R_TOKEN_START, L.R_LOGPROB_START))
        elif state[L.FLAGS] & L.STATE_FINAL_SENT:
            raise InputError(f"handle: expected a running request, {handle} has sent its final row; retire it")
        before_finish = max(int(state[L.FINISHED_LEN]) - _inside(state), 0)  # tokens in front of the one that ended it
        if not rows and state[L.FLAGS] & L.STATE_FINISHED and output_len > before_finish:
            raise InputError(f"handle: expected a running request, {handle} has finished; pack sends its final row")
        if not tokens <= output_len <= launched_len:
            raise InputError(f"output_len: expected {tokens} to {launched_len}, got {output_len}")
        scores_end = output_len if state[L.FLAGS] & L.STATE_LOGPROBS else scores
        resume = Resume(
            output_len=output_len,
            token_cursor=tokens,
            logprob_cursor=scores,
            unsent_tokens=self._unsent(slot, tokens, output_len, rows),
            unsent_logprobs=self._unsent(slot, scores, scores_end, rows, L.CHANNEL_LOGPROBS).view(np.float32),
            unsent_families=self._unsent(
                slot, scores, scores_end, rows, L.CHANNEL_FAMILIES, family_width(int(state[L.WIDTHS]))
            ),
            spec_counts=self.backend.spec_row(slot),
        )
        self.retire(np.array([handle], np.int64))
        return resume

    # --- steps ------------------------------------------------------------------------------------

    def step(
        self,
        handles: Any,
        token_ids: Any,
        *,
        accept_lens: Any = None,
        logprobs: Any = None,
        top_logprobs_val: Any = None,
        top_logprobs_idx: Any = None,
        token_ids_logprobs_val: Any = None,
        block_accept_lens: Any = None,
        cap_lens: Any = None,
        control: Control | None = None,
        return_logprob: bool = True,
    ) -> Ticket:
        """Take in what was sampled and pack what is due.

        Parameters
        ----------
        handles
            int64 `[B]`; -1 is a padding row. A handle that has ended is counted as stale.
        token_ids
            int32 or int64 `[B]`, or `[B, T]` of which the first `accept_lens[i]` count.
        accept_lens
            int32 or int64 `[B]`, each 0 to `min(T, max_accept)`; None: one each.
        logprobs
            float32 `[B]` or `[B, S]`, aligned with the accepted tokens; needed if a request of the
            batch asked for logprobs.
        top_logprobs_val, top_logprobs_idx
            float32 and int32 or int64 `[B, K]` or `[B, S, K]`: values and ids of the top logprobs of each
            accepted token, best first; needed if a request of the batch asked for some.
        token_ids_logprobs_val
            float32 `[B, M]` or `[B, S, M]`: logprobs of the ids of each request's `token_ids_logprob`, in its
            order; what stands behind them is not looked at.
        block_accept_lens, cap_lens
            int32 or int64 `[B]`, counted if the packer counts speculative decoding; `accept_lens` says that the
            step is a verify step. `cap_lens` are 0 to `max_accept`.
        control
            What the host asks of the rows, or None.
        return_logprob
            Whether logprobs are sent with this step; the backlog waits if not.

        Raises InputError (nothing was changed) and BufferBusyError.
        """
        inputs = StepInputs(
            token_ids, accept_lens, logprobs, top_logprobs_val, top_logprobs_idx, token_ids_logprobs_val,
            block_accept_lens, cap_lens,
        )  # fmt: skip
        return self._launch(handles, inputs, control, L.MODE_APPEND | L.MODE_PACK, return_logprob)

    def append(self, handles: Any, token_ids: Any, **inputs: Any) -> Ticket:
        """Only take in what was sampled (arrays as for `step`); it has conveyed rows and early sends at most."""
        return self._launch(handles, StepInputs(token_ids, **inputs), None, L.MODE_APPEND, False)

    def pack(self, handles: Any, *, control: Control | None = None, return_logprob: bool = True) -> Ticket:
        """Only pack what is due: the host has decided and says so in `control`."""
        return self._launch(handles, NO_INPUTS, control, L.MODE_PACK, return_logprob)

    @property
    def in_flight(self) -> tuple[Ticket, ...]:
        """Steps that were launched and not taken in, oldest first."""
        return tuple(self._in_flight)

    def close(self) -> None:
        """Stop; steps in flight can no longer be taken in (`OutputStreamer.close` sends them first). Idempotent."""
        self._closed = True
        self._in_flight.clear()

    def _launch(
        self, handles: Any, inputs: StepInputs, control: Control | None, mode: int, return_logprob: bool
    ) -> Ticket:
        self._check_open()
        if len(self._in_flight) >= self.config.max_in_flight:
            raise InputError(
                f"step: expected at most max_in_flight = {self.config.max_in_flight} steps that were not taken in, "
                "got another; wait() for the oldest"
            )
        mode |= L.MODE_LOGPROBS * return_logprob
        if self.config.speculative and inputs.accept_lens is not None:
            mode |= L.MODE_VERIFY | L.MODE_CAP_LENS * (inputs.cap_lens is not None)
        words = None if control is None else control.words
        launched = self.backend.step(handles, inputs, words, mode)
        ticket = Ticket(self, launched, control, mode)
        if self.keep_handles and str(getattr(handles, "device", "cpu")) == "cpu":
            ticket.handles = np.array(handles, np.int64)
        self._in_flight.append(ticket)
        return ticket

    def _take_in(self, ticket: Ticket) -> PackedStep:
        self._check_open()
        if not self._in_flight or self._in_flight[0] is not ticket:
            raise InputError("wait: expected steps to be taken in once, in the order of their launch")
        self._in_flight.popleft()
        try:
            packed = ticket.launched.result()
        except StepFailedError:
            self.close()
            raise
        if ticket.endings != self.endings and packed.rows:
            ended = self.slots.generations[packed.column(L.R_SLOT)] != packed.column(L.R_GENERATION)
            if ended.any():
                self.dropped_rows += int(ended.sum())
                packed.drop_rows(ended)
        return packed

    def _rows_in_flight(self, handle: int) -> list[tuple[PackedStep, int]]:
        """The rows of this handle that were launched and not taken in, in order."""
        steps = [ticket.launched.result() for ticket in self._in_flight]
        return [(packed, int(row)) for packed in steps for row in np.flatnonzero(packed.handles == handle)]

    def _unsent(
        self,
        slot: int,
        begin: int,
        end: int,
        rows: list[tuple[PackedStep, int]],
        channel: int = L.CHANNEL_TOKENS,
        width: int = 1,
    ) -> NDArray[np.int32]:
        """Output items [begin, end) of `width` words, int32: from the rows in flight that carry them, else the ring."""
        parts = [np.empty(0, np.int32)]
        for packed, row in rows if width else []:
            indptr, items = packed.channel(channel)
            part = items[indptr[row] : indptr[row + 1]]
            if channel == L.CHANNEL_TOKENS and packed.column(L.R_FLAGS)[row] & L.ROW_HIDDEN_TOKEN:
                part = part[:0]  # it is not output yet
            part = part[: max(end - begin, 0) * width]
            parts.append(part.copy())
            begin += len(part) // width
        if begin < end and width:
            parts.append(self.backend.unsent(slot, begin, end, channel))
        return np.concatenate(parts)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this packer was closed")
