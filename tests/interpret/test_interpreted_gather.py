"""The gather kernel under Triton's interpreter: equal to the reference, between guards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from guarded import GuardedMemory

from gpupack.core import layout as L
from gpupack.core.errors import ReleasedError, StepFailedError


@dataclass
class Guarded:
    """The interpreter's runtime with memory between guards."""

    memory: GuardedMemory = field(default_factory=GuardedMemory)
    lanes: int = 32

    def __post_init__(self) -> None:
        from gpupack.backends.cuda.host_runtime import InterpreterRuntime

        self._inner = InterpreterRuntime()
        self.device = self._inner.device
        self.host = self.zeros = self.memory.zeros
        self.record = self._inner.record
        self.prepare = self._inner.prepare

    def launch(self, *arguments: Any) -> None:
        self._inner.launch(*arguments)
        self.memory.check()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [1, 2, 7, 8, 511, 512, 513, 1023, 1024, 1025, 2050])
def test_widths_on_both_sides_of_a_tile_equal_the_reference(dtype: str, width: int) -> None:
    from gather_cases import Source, gather_is_right
    from gpupack.kernels.gather_rows import gather_shape

    from gpupack.streamer.embeddings import EmbeddingGather

    rng = np.random.default_rng(width)
    block = gather_shape(width).block
    for gap, shift in ((0, 0), (1, 0), (2, 1)):
        kind = Source(dtype, width, 9, gap, shift)
        gather = EmbeddingGather(width, dtype, max_batch=block + 1, runtime=Guarded())
        for count in {0, 1, block, block + 1}:
            gather_is_right(gather, kind.tensor(rng), rng.integers(0, kind.rows, count, np.int32))


@pytest.mark.parametrize("outside", [-1, 5, -(2**31), 2**31 - 1])
def test_rows_outside_the_source_are_left_alone(outside: int) -> None:
    from gather_cases import Source, rows_outside_are_left_alone

    source = Source("bfloat16", 37, 5, gap=3).tensor(np.random.default_rng(1))
    rows_outside_are_left_alone(Guarded(), source, np.array([4, outside, 0, outside, 4], np.int32))
    rows_outside_are_left_alone(Guarded(), source, np.array([4, 0, 4], np.int32))


def test_an_error_of_the_kernel_raises_at_the_wait_and_gives_the_buffer_back() -> None:
    from gather_cases import Source, gather_is_right

    from gpupack.streamer.embeddings import EmbeddingGather

    source = Source("float32", 6, 4).tensor(np.random.default_rng(1))
    gather = EmbeddingGather(6, max_batch=4, device="interpret", buffers=1)
    rows = np.array([1, 3], np.int32)
    gathered = gather.gather(source, rows)
    assert gathered._buffer is not None
    gathered._buffer.launch_words[L.GATHER_ERROR] = 1  # as the kernel leaves it
    with pytest.raises(StepFailedError, match="expected row numbers below 4"):
        gathered.wait()
    with pytest.raises(ReleasedError):
        gathered.bits  # noqa: B018
    gather_is_right(gather, source, rows)


def test_rows_on_the_host_are_taken_without_a_launch() -> None:
    from gpupack.streamer.embeddings import EmbeddingGather

    runtime = Guarded()
    runtime.launch = None  # type: ignore[assignment, method-assign]  # calling it would raise
    gather = EmbeddingGather(3, max_batch=2, runtime=runtime)
    rows = gather.gather(np.arange(12, dtype=np.float32).reshape(4, 3), np.array([3, 1], np.int32))
    assert rows.bits.view(np.float32).tolist() == [[9, 10, 11], [3, 4, 5]]


@pytest.mark.parametrize("device", ["cpu", "interpret"])
def test_embeddings_of_a_device_tensor_reach_the_receiver(tmp_path: Any, device: Any) -> None:
    """The packer may be on either side: an engine that decides everything on the host has its outputs on a device."""
    from gather_cases import Source, bits

    from gpupack import Packer, PackerConfig, Request
    from gpupack.streamer.embeddings import EmbeddingGather
    from gpupack.streamer.output_streamer import OutputStreamer
    from gpupack.transport.receiver import OutputReceiver
    from gpupack.transport.sender import OutputSender

    source = Source("bfloat16", 9, 5, gap=1).tensor(np.random.default_rng(4))
    config = PackerConfig(100, capacity=8, window=4, logprobs=False, device=device)
    gather = EmbeddingGather(9, "bfloat16", max_batch=8, device="interpret", buffers=1)
    with (
        OutputReceiver(f"ipc://{tmp_path}/line") as receiver,
        OutputStreamer(Packer(config), OutputSender(receiver.endpoint), gather=gather) as streamer,
    ):
        handles = streamer.admit([Request(f"r{i}") for i in range(5)])[[3, 1, 4, 0, 2]]
        for finished, rids in (([0, 1, 1, 0, 1], ["r1", "r4", "r2"]), ([1, 1, 1, 1, 1], ["r3", "r0"])):
            streamer.stream_embeddings(handles, source, finished=np.array(finished, np.bool_))
            step = receiver.recv(5000)
            assert step is not None
            assert step.frame.side is not None
            assert [opening.rid for opening in step.frame.side.openings] == rids
            array = step.frame.side.embeddings
            assert array is not None
            places = [[3, 1, 4, 0, 2].index(int(rid[1:])) for rid in rids]
            assert np.array_equal(array.numpy(), bits(source)[places])
