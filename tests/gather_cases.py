"""Gathers to try on any runtime: rows of every dtype and width, at any address, against the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpupack.streamer.embeddings import BITS, ITEM_BYTES, EmbeddingGather

UNWRITTEN = 0xA7  # every byte of an output buffer before a gather


class Source(NamedTuple):
    """What an output looks like: dtype, items of a row, rows, and where they lie.

    `gap` items lie between two rows, `shift` items before the first.
    """

    dtype: str
    width: int
    rows: int
    gap: int = 0
    shift: int = 0

    def tensor(self, rng: np.random.Generator) -> Tensor:
        """A tensor of this kind, of any bit patterns."""
        size = ITEM_BYTES[self.dtype]
        stride = self.width + self.gap
        raw = rng.integers(0, 256, (self.rows * stride + self.shift) * size, np.uint8)
        items = torch.from_numpy(raw).view(getattr(torch, self.dtype))[self.shift :]
        return items.view(self.rows, stride)[:, : self.width] if self.rows else items.view(0, self.width)


def bits(source: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's bit patterns, uint16 or uint32."""
    size = source.element_size()
    return source.view(torch.int32 if size == 4 else torch.int16).numpy().view(BITS[size])


def gather_is_right(gather: EmbeddingGather, source: Tensor, rows: np.ndarray[Any, Any]) -> None:
    """Gather and compare: the rows to the bit, and every byte of the buffer beside them."""
    buffer = gather._free[-1].rows
    buffer.fill(UNWRITTEN)
    expected = np.array([bits(source)[row] for row in rows], bits(source).dtype).reshape(len(rows), gather.width)
    gathered = gather.gather(source, rows).wait()
    assert gathered.shape == expected.shape
    assert gathered.dtype == gather.dtype
    assert np.array_equal(gathered.bits, expected)
    assert bytes(gathered.data) == expected.tobytes()
    assert (buffer[expected.nbytes :] == UNWRITTEN).all(), "bytes behind the rows were written"
    gathered.release()
