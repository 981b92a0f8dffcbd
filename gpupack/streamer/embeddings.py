"""EmbeddingGather: chosen rows of a pooled `[B, D]` output in host memory.

On a device: `index_select`, then an asynchronous copy to pinned memory. On the host: NumPy. Both end in the same
buffers, which are allocated when the gather is made.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.array_checks import host_array
from gpupack.core.config import INT32_MAX, Device
from gpupack.core.errors import BufferBusyError, ConfigError, InputError, ReleasedError

if TYPE_CHECKING:
    from gpupack.backends.cuda.runtime import DeviceRuntime, Event

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
BITS: dict[int, type[np.generic]] = {4: np.uint32, 2: np.uint16}


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor; does not load torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def dtype_name(value: Any) -> str:
    """NumPy's name of an array's or tensor's dtype, or "bfloat16"; the other byte order has another name."""
    if is_tensor(value):
        return str(value.dtype).removeprefix("torch.")
    return str(value.dtype.name) if value.dtype.isnative else str(value.dtype)


class _Buffer:
    """Memory of one gather: the rows in host memory and, with a device, index and rows there."""

    def __init__(self, runtime: DeviceRuntime | None, max_batch: int, row_bytes: int) -> None:
        words = -(-max_batch * row_bytes // L.WORD)
        if runtime is None:
            self.rows: NDArray[np.uint8] = np.empty(words, np.int32).view(np.uint8)
            return
        import torch

        self.out = runtime.host(words, torch.int32)
        self.device_out = runtime.zeros(words, torch.int32)
        self.index = runtime.host(max_batch, torch.int64)
        self.device_index = runtime.zeros(max_batch, torch.int64)
        self.rows = self.out.numpy().view(np.uint8)


class GatheredRows:
    """Rows `shape` = `[n, width]` of `dtype` in host memory; they die with `release()`.

    Reading them waits for the copy. Using them after `release()` raises ReleasedError; arrays taken
    before stay NumPy views and must not be kept.
    """

    __slots__ = ("_buffer", "_event", "_gather", "dtype", "shape")

    def __init__(self, gather: EmbeddingGather, buffer: _Buffer, count: int, event: Event | None) -> None:
        self._gather = gather
        self._buffer: _Buffer | None = buffer
        self._event = event
        self.dtype = gather.dtype
        self.shape = (count, gather.width)

    def ready(self) -> bool:
        """Whether `wait()` would return at once; does not block. Always so for rows that came from the host."""
        return self._event is None or self._event.query()

    def wait(self) -> GatheredRows:
        """Itself, when the rows are there; blocks until they have been copied."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self

    @property
    def bits(self) -> NDArray[Any]:
        """The rows' bit patterns, uint32 or uint16 `[n, width]`: a view."""
        self.wait()
        if self._buffer is None:
            raise ReleasedError("these rows were released; take what is needed before release()")
        size = ITEM_BYTES[self.dtype]
        return self._buffer.rows[: self.shape[0] * self.shape[1] * size].view(BITS[size]).reshape(self.shape)

    @property
    def data(self) -> memoryview:
        """The rows' bytes in C order: a view."""
        return self.bits.data.cast("B") if self.shape[0] else memoryview(b"")

    def release(self) -> None:
        """Give the buffer back for a later gather. Waits for a launch in flight; twice is harmless."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            if self._event is not None:  # else a later gather would be written over
                self._event.synchronize()
            self._gather.give_back(buffer)


class EmbeddingGather:
    """Compacts chosen rows of `[rows, width]` outputs into host memory. One thread owns it.

    Parameters
    ----------
    width
        Items of a row.
    dtype
        "float32", "float16" or "bfloat16"; items are copied bit by bit.
    max_batch
        Most rows that are chosen at once.
    device
        As in PackerConfig: where the outputs are. Those on the host are taken from there in any case.
    buffers
        Gathers that may be in use at once: launched, or being read.

    ConfigError for a value out of range. No call allocates memory that grows with `width`, but for host
    arrays whose rows are not adjacent.
    """

    def __init__(
        self,
        width: int,
        dtype: str = "float32",
        *,
        max_batch: int,
        device: Device = "cpu",
        buffers: int = 2,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        for name, value in (("width", width), ("max_batch", max_batch), ("buffers", buffers)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= INT32_MAX:
                raise ConfigError(f"{name}: expected an integer from 1 to {INT32_MAX}, got {value!r}")
        if dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype: expected one of {tuple(ITEM_BYTES)}, got {dtype!r}")
        if device not in get_args(Device):
            raise ConfigError(f"device: expected one of {get_args(Device)}, got {device!r}")
        if runtime is None and device != "cpu":
            from gpupack.backends.cuda.host_runtime import make_runtime

            runtime = make_runtime(device)
        self.width, self.dtype, self.max_batch = width, dtype, max_batch
        self.runtime = runtime
        self._free = [_Buffer(runtime, max_batch, self.row_bytes) for _ in range(buffers)]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * ITEM_BYTES[self.dtype]

    def gather(self, source: Any, rows: NDArray[np.int32]) -> GatheredRows:
        """Copy rows `rows`, int32 `[n]`, of `source` in that order; on a device work is enqueued on its stream.

        Parameters
        ----------
        source
            `[rows, width]` of the gather's dtype: a tensor on its device, a CPU tensor or a NumPy array
            (of bfloat16 only tensors). The last dimension is contiguous, rows may lie at any distance.
        rows
            Row numbers; any may come more than once.

        Raises InputError and BufferBusyError; nothing was launched then. Does not synchronise.
        """
        self.check(source)
        rows = host_array("rows", rows, (np.int32,), (1,))
        if len(rows) > self.max_batch:
            raise InputError(f"rows: expected at most max_batch = {self.max_batch}, got {len(rows)}")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < source.shape[0]:
            raise InputError(f"rows: expected 0 to {source.shape[0] - 1}, got {int(rows.min())} to {int(rows.max())}")
        self.check_free()
        buffer, event = self._free[-1], None
        if self._on_device(source):
            event = self._launch(source, rows, buffer)
        else:
            out = buffer.rows[: len(rows) * self.row_bytes].view(BITS[ITEM_BYTES[self.dtype]])
            _take(self._host_bits(source), rows, out.reshape(len(rows), self.width))
        self._free.pop()
        return GatheredRows(self, buffer, len(rows), event)

    def check(self, source: Any, name: str = "embeddings") -> None:
        """Raise InputError unless `source` is something that rows can be gathered from."""
        if not (is_tensor(source) or isinstance(source, np.ndarray)):
            raise InputError(f"{name}: expected an array or tensor, got {type(source).__name__}")
        if dtype_name(source) != self.dtype:
            raise InputError(f"{name}: expected dtype {self.dtype}, got {dtype_name(source)}")
        if source.ndim != 2 or source.shape[1] != self.width:
            raise InputError(f"{name}: expected shape [rows, {self.width}], got {tuple(source.shape)}")
        row, item = source.stride() if is_tensor(source) else (n // source.itemsize for n in source.strides)
        if not source.shape[0]:
            return  # the strides of nothing may be anything
        if (item != 1 and self.width > 1) or not 0 <= row <= INT32_MAX or source.shape[0] > INT32_MAX:
            raise InputError(
                f"{name}: expected contiguous rows at most {INT32_MAX} items apart, got strides {(row, item)}"
            )
        if is_tensor(source) and source.device.type != "cpu" and not self._on_device(source):
            here = "the CPU" if self.runtime is None else f"the CPU or {self.runtime.device}"
            raise InputError(f"{name}: expected a tensor on {here}, got one on {source.device}")

    def check_free(self) -> None:
        """Raise BufferBusyError unless there is a buffer for another gather."""
        if not self._free:
            raise BufferBusyError("gather: all buffers are in use; release earlier rows first")

    def give_back(self, buffer: _Buffer) -> None:
        """A reader is done with a buffer."""
        self._free.append(buffer)

    def _on_device(self, source: Any) -> bool:
        return self.runtime is not None and is_tensor(source) and source.device == self.runtime.device

    def _launch(self, source: Any, rows: NDArray[np.int32], buffer: _Buffer) -> Event:
        import torch

        runtime, count = self.runtime, len(rows)
        assert runtime is not None
        bits = torch.int32 if ITEM_BYTES[self.dtype] == L.WORD else torch.int16
        if count:
            buffer.index.numpy()[:count] = rows
            runtime.copy(buffer.device_index[:count], buffer.index[:count])
            out, selected = (words.view(bits)[: count * self.width] for words in (buffer.out, buffer.device_out))
            runtime.select(source.detach().view(bits), buffer.device_index[:count], selected.view(count, self.width))
            runtime.copy(out, selected)
        return runtime.record()

    def _host_bits(self, source: Any) -> NDArray[Any]:
        bits = BITS[ITEM_BYTES[self.dtype]]
        if is_tensor(source):
            import torch

            source = source.detach().view(torch.int32 if bits is np.uint32 else torch.int16).numpy()
        return source.view(bits)


def _take(source: NDArray[Any], rows: NDArray[np.int32], out: NDArray[Any]) -> None:
    """`out[:] = source[rows]`; rows have been checked."""
    if source.flags.c_contiguous:
        np.take(source, rows, axis=0, out=out, mode="clip")  # with mode "raise" NumPy would buffer the output
    else:  # take would copy the whole source first
        out[:] = source[rows]
