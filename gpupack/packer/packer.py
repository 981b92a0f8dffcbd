"""Packer: admit, step, append, pack, retract, retire, close; one backend behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.base import Launched
from gpupack.backends.factory import make_backend
from gpupack.backends.slot_state import check_admission, state_rows
from gpupack.core import layout as L
from gpupack.core.array_checks import host_array
from gpupack.core.config import PackerConfig
from gpupack.core.errors import BufferBusyError, ClosedError, InputError, StepFailedError
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import FRESH, Request, Resume
from gpupack.core.row_control import Control
from gpupack.core.step_inputs import NO_INPUTS, StepInputs
from gpupack.packer.pending_step import Ticket
from gpupack.packer.retract import where_it_stands
from gpupack.packer.slots import SlotTable

T = TypeVar("T")


class Packer:
    """Per-request offsets and unsent output; decides who sends and packs what they send.

    With `convey` (the default) host-judged requests are passed on for the streamer's gate. Without
    it they keep their cursors here and only `control` ends or holds them: for engines that decide
    everything on the host. One thread owns a packer. On the CPU nothing is asynchronous. On a device all
    work goes to `stream`, a torch stream, or without one to the stream that is current at each call.
    """

    def __init__(self, config: PackerConfig, *, convey: bool = True, stream: Any = None) -> None:
        self.config = config
        self.slots = SlotTable(config.capacity)
        self.backend = make_backend(config, stream=stream)
        self.convey = convey
        self.keep_handles = False  # the streamer needs to know who is in a batch
        self.endings = 0
        self.dropped_rows = 0
        self._max_in_flight, self._speculative = config.max_in_flight, config.speculative
        self._in_flight: deque[Ticket] = deque()
        self._prepared: Ticket | None = None
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
        resumes = [entry or FRESH for entry in resume or [None] * len(requests)]
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
        resumes, nothing = [FRESH] * len(slots), [False] * len(slots)
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
        if self._prepared is not None:  # its launch may have sent rows that nobody could find
            raise InputError("retract: expected commit_launch() after prepare_launch() first, got retract()")
        slot = int(self.slots.slots_of(np.array([handle], np.int64))[0])
        launched = [ticket.launched for ticket in self._in_flight]
        try:
            resume = where_it_stands(self.backend, launched, slot, handle, output_len)
        except StepFailedError:
            self.close()
            raise
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
        verify: bool | None = None,
        control: Control | None = None,
        return_logprob: bool = True,
    ) -> Ticket:
        """Take in what was sampled and pack what is due.

        Parameters
        ----------
        handles
            int64 `[B]`; -1 is a padding row. A handle that has ended is counted as stale. One given twice is
            refused on the CPU and not noticed on a device.
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
            int32 or int64 `[B]`, counted if the packer counts speculative decoding. `cap_lens` are 0 to `max_accept`.
        verify
            Whether this is a verify step, whose rows are counted; None: if there are `accept_lens`.
        control
            What the host asks of the rows, or None.
        return_logprob
            Whether logprobs are sent with this step; the backlog waits if not.

        Raises InputError (nothing was changed) and BufferBusyError. What a device has to say of lengths comes when the
        step is taken in, as StepFailedError.
        """
        inputs = StepInputs(
            token_ids, accept_lens, logprobs, top_logprobs_val, top_logprobs_idx, token_ids_logprobs_val,
            block_accept_lens, cap_lens, verify,
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
        """Stop; steps in flight can no longer be taken in (`OutputStreamer.close` sends them first). Idempotent.

        Waits until they have been done: after that the packer's memory may go.
        """
        if not self._closed:
            self._closed = True
            self._in_flight.clear()
            self.backend.close()

    # --- a step in three parts, around a CUDA graph -----------------------------------------------

    def prepare_launch(
        self,
        handles: Any,
        token_ids: Any = None,
        *,
        control: Control | None = None,
        return_logprob: bool = True,
        **inputs: Any,
    ) -> None:
        """Say what the next launch takes in, as for `step`; without `token_ids` it only packs.

        Then `enqueue()`, or a graph that captured it, then `commit_launch()`. The arrays are read when the launch
        runs: those on the device may be written until then, in stream order. Raises as `step` does.
        """
        mode = L.MODE_PACK | L.MODE_APPEND * (token_ids is not None)
        mode = self._mode(StepInputs(token_ids, **inputs), mode, return_logprob)
        self.backend.prepare(handles, StepInputs(token_ids, **inputs), None if control is None else control.words, mode)
        self._prepared = self._ticket(handles, control, mode)

    def enqueue(self, batch_capacity: int | None = None) -> None:
        """Enqueue the launch for batches of up to `batch_capacity` rows (`max_batch`): what a graph may capture.

        Capturing counts nothing; each replay belongs between a `prepare_launch` and a `commit_launch`, on the stream
        of the packer's other work: to be in an engine's graph, a packer has no stream of its own.
        """
        self._check_open()
        self.backend.enqueue(self.launch_capacity(batch_capacity))

    def commit_launch(self) -> Ticket:
        """The ticket of the launch that was prepared and enqueued; records its event right behind it."""
        self._check_open()
        if self._prepared is None:
            raise InputError("commit_launch: expected prepare_launch() before, got none")
        ticket, self._prepared = self._prepared, None
        return self._launched(ticket, self.guarded(self.backend.commit))

    def launch_capacity(self, rows: int | None) -> int:
        """Rows that a launch is made for: `rows`, if there can be as many, or all."""
        most = self.config.batch_capacity
        if rows is not None and not 1 <= rows <= most:
            raise InputError(f"batch_capacity: expected 1 to max_batch = {most}, got {rows}")
        return most if rows is None else rows

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named span of the host's time: an NVTX range on CUDA, nothing elsewhere."""
        return self.backend.span(name)

    def _launch(
        self, handles: Any, inputs: StepInputs, control: Control | None, mode: int, return_logprob: bool
    ) -> Ticket:
        mode = self._mode(inputs, mode, return_logprob)
        words = None if control is None else control.words
        launched = self.guarded(self.backend.step, handles, inputs, words, mode)
        return self._launched(self._ticket(handles, control, mode), launched)

    def _mode(self, inputs: StepInputs, mode: int, return_logprob: bool) -> int:
        """The mode of a launch that may begin now."""
        self._check_open()
        if len(self._in_flight) >= self._max_in_flight:
            raise InputError(
                f"step: expected at most max_in_flight = {self.config.max_in_flight} steps that were not taken in, "
                "got another; wait() for the oldest"
            )
        if mode & L.MODE_APPEND and inputs.token_ids is None:
            raise InputError("token_ids: expected an array or tensor, got None")
        mode |= L.MODE_LOGPROBS * return_logprob
        if self._speculative and inputs.is_verify:
            mode |= L.MODE_VERIFY | L.MODE_CAP_LENS * (inputs.cap_lens is not None)
        return mode

    def guarded(self, launch: Callable[..., T], *arguments: Any) -> T:
        """Launch with `arguments`; whatever goes wrong after the inputs were found good closes the packer."""
        try:
            return launch(*arguments)
        except (InputError, BufferBusyError):
            raise
        except Exception as error:
            self.close()
            raise StepFailedError(f"step: the launch failed, the packer is closed: {error}") from error

    def _ticket(self, handles: Any, control: Control | None, mode: int) -> Ticket:
        ticket = Ticket(self.take_in, control, mode, self.endings)
        if self.keep_handles and str(getattr(handles, "device", "cpu")) == "cpu":
            ticket.handles = np.array(handles, np.int64)
        return ticket

    def _launched(self, ticket: Ticket, launched: Launched) -> Ticket:
        ticket.launched = launched
        self._in_flight.append(ticket)
        return ticket

    def take_in(self, ticket: Ticket) -> PackedStep:
        """What `Ticket.wait` does."""
        self._check_open()
        if not self._in_flight or self._in_flight[0] is not ticket:
            raise InputError("wait: expected steps to be taken in once, in the order of their launch")
        try:
            packed = ticket.launched.result()
        except StepFailedError:
            self.close()
            raise
        self._in_flight.popleft()
        if ticket.endings != self.endings and packed.rows:
            ended = self.slots.generations[packed.column(L.R_SLOT)] != packed.column(L.R_GENERATION)
            if ended.any():
                self.dropped_rows += int(ended.sum())
                packed.drop_rows(ended)
        return packed

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this packer was closed")
