"""Ticket: a launched step, until it is taken in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpupack.backend import Launched
from gpupack.control import Control
from gpupack.packed import PackedStep
from gpupack.request import FinishReason

if TYPE_CHECKING:
    from gpupack.packer import Packer


class Ticket:
    """A launched step: `wait()` gives its PackedStep. Steps are taken in, in the order of their launch.

    It is made when the step is prepared, and says who had ended by then; `launched` comes with the launch.
    """

    __slots__ = ("_packer", "control", "endings", "handles", "launched", "mode", "reasons")

    launched: Launched

    def __init__(self, packer: Packer, control: Control | None, mode: int) -> None:
        self._packer = packer
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
        return self._packer.take_in(self)
