"""LaunchRing: the buffers that launches use in turn, and who has them."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from gpupack.backends.cuda.device_inputs import LENS
from gpupack.backends.cuda.runtime import DeviceRuntime
from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import BufferBusyError
from gpupack.kernels.launch import ring_words


class RingBuffer:
    """One buffer: what the host writes for a launch, and the packed step as the host reads it.

    `control` and `out` int32 words, `addresses` int64 (`layout.LAUNCH_INPUTS`), in memory that the kernel reaches
    (`out` of transfer "copy" is where the copy goes). `handles` int64 and `lens` int32 `[max_batch]` are staging
    for inputs that the host has.
    """

    def __init__(self, runtime: DeviceRuntime, batch: int, control: torch.Tensor, out: torch.Tensor) -> None:
        self.handles = runtime.host(batch, torch.int64)
        self.lens = {name: runtime.host(batch, torch.int32) for name in LENS}
        self.out_tensor = out
        self.out: NDArray[np.int32] = out.numpy()
        self.control: NDArray[np.int32] = control.numpy()
        self.addresses: NDArray[np.int64] = self.control[L.LAUNCH_ADDRESSES : L.LAUNCH_WORDS].view(np.int64)
        self.busy = False


class LaunchRing:
    """`config.buffers` buffers, used in turn: the kernel picks its own by a number that it counts on the device, too.

    A buffer is taken only after its last reader gave it back; readers may be on another thread.
    """

    def __init__(self, runtime: DeviceRuntime, config: PackerConfig) -> None:
        self._runtime = runtime
        self._timeout_s = config.ring_timeout_s
        size = config.buffers
        self.control_words, self.out_words = ring_words(config)
        step_words = L.packed_layout(config.batch_capacity, config.packed_shape).size
        self.control = runtime.host(size * self.control_words, torch.int32)
        host = runtime.host(size * self.out_words, torch.int32)
        self.copies = config.transfer == "copy"
        self.out = runtime.zeros(size * self.out_words, torch.int32) if self.copies else host
        self.buffers = []
        for i in range(size):
            control, out = _part(self.control, i, self.control_words), _part(host, i, self.out_words)[:step_words]
            self.buffers.append(RingBuffer(runtime, config.batch_capacity, control, out))
        self.next = 0
        self._given_back = threading.Condition()

    def take(self) -> RingBuffer:
        """The next buffer; blocks up to `config.ring_timeout_s` while a reader has it, then raises BufferBusyError."""
        buffer = self.buffers[self.next]
        with self._given_back:
            if not self._given_back.wait_for(lambda: not buffer.busy, self._timeout_s):
                raise BufferBusyError(
                    f"step: the next of {len(self.buffers)} packed steps is still in use after {self._timeout_s} s; "
                    "release earlier ones first"
                )
        return buffer

    def advance(self) -> None:
        """The buffer that `take` gave goes to a launch."""
        self.buffers[self.next].busy = True
        self.next = (self.next + 1) % len(self.buffers)

    def give_back(self, buffer: RingBuffer) -> None:
        """The reader is done with a buffer."""
        with self._given_back:
            buffer.busy = False
            self._given_back.notify_all()

    def fetch(self, buffer: RingBuffer, start: int, end: int) -> None:
        """Copy words [start, end) of a packed step that was written to the host; blocks."""
        self._runtime.fetch(buffer.out_tensor[start:end], self.device_out(buffer)[start:end])

    def device_out(self, buffer: RingBuffer) -> torch.Tensor:
        """Where the kernel writes the packed step of a buffer, int32 words."""
        return _part(self.out, self.buffers.index(buffer), self.out_words)


def _part(ring: torch.Tensor, index: int, words: int) -> torch.Tensor:
    return ring[index * words : (index + 1) * words]
