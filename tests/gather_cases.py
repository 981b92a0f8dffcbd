"""Gathers to try on any runtime: rows of every dtype and width, at any address, against the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gpupack.kernels.gather_rows import reference
from torch import Tensor

from gpupack.core import layout as L
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

    @property
    def words(self) -> int:
        """Words of a row: of 32 bits where everything of this output is even, else of 16."""
        odd = self.width % 2 or self.gap % 2 or self.shift % 2
        return self.width if odd or self.dtype == "float32" else self.width // 2

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
    expected = np.zeros((len(rows), gather.width), bits(source).dtype)
    assert not reference(bits(source), rows, expected)
    gathered = gather.gather(source, rows).wait()
    assert gathered.shape == expected.shape
    assert gathered.dtype == gather.dtype
    assert np.array_equal(gathered.bits, expected)
    assert bytes(gathered.data) == expected.tobytes()
    assert (buffer[expected.nbytes :] == UNWRITTEN).all(), "bytes behind the rows were written"
    gathered.release()


def rows_outside_are_left_alone(runtime: Any, source: Tensor, rows: np.ndarray[Any, Any]) -> None:
    """The launcher itself, which nothing protects from row numbers outside the source."""
    from gpupack.kernels.gather_rows import gather_rows

    launch = runtime.host(L.GATHER_WORDS + len(rows), torch.int32)
    launch.numpy()[L.GATHER_WORDS :] = rows
    expected = np.full((len(rows), source.shape[1]), 0, bits(source).dtype)
    expected.view(np.uint8).fill(UNWRITTEN)
    out = runtime.host(-(-expected.nbytes // L.WORD), torch.int32)
    out.numpy().view(np.uint8).fill(UNWRITTEN)
    outside = reference(bits(source), rows, expected)
    gather_rows(runtime, source, launch, out, len(rows))
    assert bool(launch.numpy()[L.GATHER_ERROR]) == outside
    assert out.numpy().tobytes()[: expected.nbytes] == expected.tobytes()
