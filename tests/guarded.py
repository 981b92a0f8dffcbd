"""Guard zones: memory that knows what was around it, for runtimes whose memory is on the host."""

from __future__ import annotations

import torch
from torch import Tensor

GUARD = 256  # bytes on each side; keeps the alignment of what is between them
CANARY = 0xC5


class GuardedMemory:
    """Allocates tensors between canaries and says whether these still live."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def zeros(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared memory `[words]` in the middle of a larger block."""
        size = words * dtype.itemsize
        block = torch.full((size + 2 * GUARD,), CANARY, dtype=torch.uint8)
        block[GUARD : GUARD + size] = 0
        self._blocks.append(block)
        return block[GUARD : GUARD + size].view(dtype)

    def check(self) -> None:
        """AssertionError if anything was written around an allocation."""
        for number, block in enumerate(self._blocks):
            for side, zone in (("before", block[:GUARD]), ("behind", block[-GUARD:])):
                assert bool((zone == CANARY).all()), f"written {side} allocation {number}"
