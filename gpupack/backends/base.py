"""What a packer asks of its backend, and what it gets for a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Resume
from gpupack.core.step_inputs import StepInputs


class Launched(Protocol):
    """A step that was launched; the result is there after its event."""

    def ready(self) -> bool:
        """Whether `result()` would return at once; does not block."""
        ...

    def result(self) -> PackedStep:
        """The packed step; blocks the host until the launch has been done."""
        ...


class Backend(Protocol):
    """Arenas and the rule over them. Calls take effect in their order; one thread owns a backend."""

    def install(self, slots: NDArray[np.int64], rows: NDArray[np.int32], resumes: Sequence[Resume]) -> None:
        """Begin handles: state rows int32 `[n, STATE_WIDTH]`, and what resumed ones have not sent."""
        ...

    def end(self, slots: NDArray[np.int64]) -> None:
        """End the handles of slots int64 `[n]`; rows that still come for them are stale."""
        ...

    def state_row(self, slot: int) -> NDArray[np.int32]:
        """Copy of a slot's state, int32 `[STATE_WIDTH]`; may synchronise."""
        ...

    def spec_row(self, slot: int) -> NDArray[np.int32]:
        """Copy of a slot's speculative counters, int32 `[spec_width]`; may synchronise."""
        ...

    def unsent(self, slot: int, begin: int, end: int, channel: int = L.CHANNEL_TOKENS) -> NDArray[np.int32]:
        """Copy of a channel's output items [begin, end), int32; may synchronise."""
        ...

    def step(self, handles: Any, inputs: StepInputs, control: NDArray[np.int32] | None, mode: int) -> Launched:
        """One step, see Packer.step; `mode` has `layout.MODE_*` bits."""
        ...

    def prepare(self, handles: Any, inputs: StepInputs, control: NDArray[np.int32] | None, mode: int) -> None:
        """Say what the next launch takes in, without launching it; see Packer.prepare_launch."""
        ...

    def enqueue(self, batch_capacity: int) -> None:
        """Enqueue the launch; nothing of it depends on the host's memory being read now."""
        ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named span of the host's time for a device's profiler; nothing on the CPU."""
        ...

    def commit(self) -> Launched:
        """The launch that was prepared and enqueued."""
        ...

    def close(self) -> None:
        """Block until nothing that was enqueued uses the backend's memory any more."""
        ...
