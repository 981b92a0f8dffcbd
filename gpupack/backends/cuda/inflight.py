"""DeviceStep: a launch in flight, and how its packed step reaches the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.cuda.buffer_ring import LaunchRing, RingBuffer
from gpupack.backends.cuda.runtime import DeviceRuntime, Event
from gpupack.core import layout as L
from gpupack.core.errors import StepFailedError
from gpupack.core.packed_output import PackedStep

_CAUSES = {
    L.ERROR_INPUT: "accept_lens, other lens or a length in control out of range, or too few logprobs for a request "
    "that asked",
    L.ERROR_NUMBER: "a launch ran without prepare_launch() before it",
    L.ERROR_BATCH: "more rows than the launch was made for, see enqueue() and PackGraph",
}


class DeviceStep:
    """A launch in flight: its buffer, its event, and what of the buffer has been copied ("copy" only).

    `number` is the launch number that its header must carry, `spec_width` the speculative counters of a row.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        ring: LaunchRing,
        buffer: RingBuffer,
        number: int,
        layout: L.PackedLayout,
        *,
        logprobs: bool,
        spec_width: int,
    ) -> None:
        self.buffer = buffer
        self.number = number
        self.layout = layout
        self._runtime, self._ring = runtime, ring
        self._spec_width = spec_width
        self._with_logprobs = logprobs
        self._event: Event | None = None
        self._copied: dict[int, int] = {}  # first word of a section: words that were copied from there
        self._packed: PackedStep | None = None

    def committed(self, event: Event, copied: dict[int, int]) -> None:
        """The event behind the launch, and behind the copies of what it was expected to fill."""
        self._event, self._copied = event, copied

    def ready(self) -> bool:
        """Whether the launch has been done; does not block."""
        assert self._event is not None
        try:
            return self._event.query()
        except RuntimeError:  # the device failed: waiting says so
            return True

    def result(self) -> PackedStep:
        """The packed step; blocks until the launch has been done. StepFailedError if it went wrong."""
        if self._packed is None:
            assert self._event is not None
            self._wait(self._event.synchronize)
            words = self.buffer.out
            launch, error = int(words[L.H_LAUNCH]), int(words[L.H_ERROR])
            if launch != self.number or error:
                causes = [text for bit, text in _CAUSES.items() if error & bit]
                cause = "; ".join(causes) or "a launch ran without prepare_launch() before it, or not after it"
                raise StepFailedError(
                    f"step {self.number}: the kernel reported launch {launch}, error {error} ({cause})"
                )
            self._fetch_rest(words)
            logprobs = self._with_logprobs or bool(words[L.H_LOGPROBS])
            self._packed = PackedStep(words, self.layout, logprobs, self._release, spec_width=self._spec_width)
        return self._packed

    def _wait(self, call: Callable[[], None]) -> None:
        with self._runtime.span("wait"):
            try:
                call()
            except RuntimeError as error:  # what the device reports of this launch or an earlier one
                raise StepFailedError(f"step {self.number}: the device reported: {error}") from error

    def _fetch_rest(self, words: NDArray[np.int32]) -> None:
        """Copy what the step filled beyond what it was expected to fill."""
        tokens, logprobs, families = words[[L.H_TOKENS, L.H_LOGPROBS, L.H_FAMILIES]].tolist()
        for start, used in sections(self.layout, tokens, logprobs, families):
            done = self._copied.get(start, used)
            if used > done:
                self._wait(partial(self._ring.fetch, self.buffer, start + done, start + used))

    def _release(self, _: NDArray[np.int32]) -> None:
        self._ring.give_back(self.buffer)


def sections(layout: L.PackedLayout, tokens: int, logprobs: int, families: int) -> list[tuple[int, int]]:
    """First word and words in use of the sections of a packed step; header and row table go with the tokens."""
    return [(0, layout.tokens + tokens), (layout.logprobs, logprobs), (layout.families, families)]
