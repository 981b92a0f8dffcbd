"""Ticket: a launched step, until it is taken in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.base import Launched
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import FinishReason
from gpupack.core.row_control import Control


class Ticket:
    """A launched step: `wait()` gives its PackedStep. Steps are taken in, in the order of their launch.

    It is made when the step is prepared; `launched` comes with the launch. `complete` takes the step in, `endings`
    counts the handles that had ended when the step was prepared.
    """

    __slots__ = ("_complete", "control", "endings", "handles", "launched", "mode", "reasons")

    launched: Launched

    def __init__(
        self, complete: Callable[[Ticket], PackedStep], control: Control | None, mode: int, endings: int
    ) -> None:
        self._complete = complete
        # The caller may use its Control again before this step is taken in.
        self.control = None if control is None else control.words.copy()
        self.mode = mode
        self.reasons: dict[int, FinishReason] = {}  # by handle: why the host ends requests with this step
        self.endings = endings
        self.handles: NDArray[np.int64] | None = None  # of the batch, a copy, if the packer keeps them

    def ready(self) -> bool:
        """Whether `wait()` would return at once; does not block. Always so on the CPU."""
        return self.launched.ready()

    def wait(self) -> PackedStep:
        """The packed step; blocks until the launch has been done.

        Rows of handles that ended since the launch are dropped and counted. StepFailedError if the
        step went wrong; the packer is closed then.
        """
        return self._complete(self)
