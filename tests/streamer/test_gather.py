"""EmbeddingGather: bit copies of every dtype, buffers that are reused, views that die, refusals.

`HostRuntime` takes the device's way through the same torch operations, in host memory.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from gather_cases import Source, bits, gather_is_right

from gpupack import OutputReceiver, OutputSender, OutputStreamer, Packer, PackerConfig, Request
from gpupack.backends.cuda.host_runtime import HostRuntime
from gpupack.core.errors import BufferBusyError, ConfigError, InputError, ReleasedError
from gpupack.streamer.embeddings import EmbeddingGather

ROWS = np.array([2, 0, 2], np.int32)
ODD_BITS = [0x7F800001, 0xFFC01234, 0x80000000, 0x00000001, 0xFF800000]  # NaNs, -0.0, a denormal, -inf


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [1, 2, 31, 1024])
@pytest.mark.parametrize(("gap", "shift"), [(0, 0), (1, 0), (3, 1)])
@pytest.mark.parametrize("runtime", [None, HostRuntime()], ids=["host", "device"])
def test_equals_the_reference(runtime: Any, dtype: str, width: int, gap: int, shift: int) -> None:
    rng = np.random.default_rng(width)
    kind = Source(dtype, width, 9, gap, shift)
    gather = EmbeddingGather(width, dtype, max_batch=12, runtime=runtime)
    for count in (0, 1, 11, 12):
        gather_is_right(gather, kind.tensor(rng), rng.integers(0, kind.rows, count, np.int32))


def test_numpy_arrays_and_odd_bit_patterns() -> None:
    source = np.array([ODD_BITS[::-1], [0] * 5, ODD_BITS], np.uint32).view(np.float32)
    gather = EmbeddingGather(5, max_batch=3)
    rows = gather.gather(source, ROWS)
    assert rows.bits.tolist() == [ODD_BITS, ODD_BITS[::-1], ODD_BITS]
    assert (rows.dtype, rows.shape, rows.ready()) == ("float32", (3, 5), True)
    half = EmbeddingGather(3, "float16", max_batch=3).gather(np.arange(9, dtype=np.float16).reshape(3, 3), ROWS)
    assert half.bits.view(np.float16).tolist() == [[6, 7, 8], [0, 1, 2], [6, 7, 8]]


def test_rows_on_the_host_are_taken_there_by_a_gather_of_a_device() -> None:
    runtime = HostRuntime()
    runtime.select = None  # type: ignore[assignment]  # calling it would raise
    rows = EmbeddingGather(3, max_batch=2, runtime=runtime).gather(
        np.arange(12, dtype=np.float32).reshape(4, 3), np.array([3, 1], np.int32)
    )
    assert rows.bits.view(np.float32).tolist() == [[9, 10, 11], [3, 4, 5]]


def test_a_tensor_that_asks_for_gradients() -> None:
    source = torch.arange(6.0, requires_grad=True).reshape(3, 2)
    assert EmbeddingGather(2, max_batch=3).gather(source, ROWS).bits.view(np.float32).tolist() == [
        [4, 5], [0, 1], [4, 5],
    ]  # fmt: skip


def test_views_die_with_release_and_buffers_come_round() -> None:
    gather = EmbeddingGather(2, max_batch=3, buffers=2)
    source = np.arange(6, dtype=np.float32).reshape(3, 2)
    first, second = gather.gather(source, ROWS), gather.gather(source, ROWS)
    with pytest.raises(BufferBusyError, match="release earlier rows"):
        gather.gather(source, ROWS)
    first.release()
    first.release()
    for use in (lambda: first.bits, lambda: first.data):
        with pytest.raises(ReleasedError):
            use()
    third = gather.gather(source + 10, ROWS[:1])
    assert third.bits.view(np.float32).tolist() == [[14, 15]]
    assert second.bits.view(np.float32).tolist() == [[4, 5], [0, 1], [4, 5]], "a reader keeps its own buffer"


def test_a_step_allocates_nothing_that_grows_with_the_width() -> None:
    gather = EmbeddingGather(1 << 16, max_batch=8, buffers=1)
    source, rows = np.zeros((8, 1 << 16), np.float32), np.arange(8, dtype=np.int32)
    gather.gather(source, rows).release()
    tracemalloc.start()
    try:
        for _ in range(3):
            gather.gather(source, rows).release()
        assert tracemalloc.get_traced_memory()[1] < gather.row_bytes // 8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"width": 0}, "width: expected an integer from 1"),
        ({"width": 2.0}, "width: expected an integer"),
        ({"width": True}, "width: expected an integer"),
        ({"max_batch": 0}, "max_batch: expected an integer from 1"),
        ({"buffers": 0}, "buffers: expected an integer from 1"),
        ({"dtype": "float64"}, "dtype: expected one of .*'bfloat16'.*, got 'float64'"),
        ({"dtype": torch.float16}, "dtype: expected one of"),
        ({"device": "interpret"}, "device: expected TRITON_INTERPRET=1"),
        ({"device": "tpu"}, "device: expected one of .*, got 'tpu'"),
    ],
)
def test_construction_is_checked(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EmbeddingGather(**{"width": 4, "max_batch": 2} | options)  # type: ignore[arg-type]


SQUARE = np.zeros((3, 4), np.float32)


@pytest.mark.parametrize(
    ("source", "rows", "match"),
    [
        ([[0.0] * 4] * 3, ROWS, "embeddings: expected an array or tensor, got list"),
        (SQUARE.astype(np.float64), ROWS, "embeddings: expected dtype float32, got float64"),
        (SQUARE.astype(">f4"), ROWS, "embeddings: expected dtype float32, got >f4"),
        (torch.zeros(3, 4, dtype=torch.bfloat16), ROWS, "embeddings: expected dtype float32, got bfloat16"),
        (SQUARE[:, :3], ROWS, r"embeddings: expected shape \[rows, 4\], got \(3, 3\)"),
        (SQUARE[0], ROWS, r"embeddings: expected shape \[rows, 4\], got \(4,\)"),
        (np.zeros((4, 3), np.float32).T, ROWS, r"expected contiguous rows .*, got strides \(1, 3\)"),
        (torch.zeros(3, 8)[:, ::2], ROWS, r"expected contiguous rows .*, got strides \(8, 2\)"),
        (SQUARE[::-1], ROWS, r"expected contiguous rows .*, got strides \(-4, 1\)"),
        (torch.empty(3, 4, device="meta"), ROWS, "expected a tensor on the CPU, got one on meta"),
        (SQUARE, ROWS.astype(np.int64), "rows: expected dtype int32, got int64"),
        (SQUARE, np.zeros(6, np.int32), "rows: expected at most max_batch = 5, got 6"),
        (SQUARE, np.array([0, 3], np.int32), "rows: expected 0 to 2, got 0 to 3"),
        (SQUARE, np.array([-1], np.int32), "rows: expected 0 to 2, got -1 to -1"),
        (SQUARE[:0], np.array([0], np.int32), "rows: expected 0 to -1, got 0 to 0"),
    ],
)
def test_inputs_are_checked_and_cost_no_buffer(source: object, rows: np.ndarray, match: str) -> None:  # type: ignore[type-arg]
    gather = EmbeddingGather(4, max_batch=5, buffers=1)
    with pytest.raises(InputError, match=match):
        gather.gather(source, rows)
    gather.gather(SQUARE, ROWS).release()


def test_embeddings_of_a_device_tensor_reach_the_receiver(tmp_path: Any) -> None:
    """An engine that decides everything on the host has its outputs on a device."""
    source = Source("bfloat16", 9, 5, gap=1).tensor(np.random.default_rng(4))
    config = PackerConfig(100, capacity=8, window=4, logprobs=False)
    gather = EmbeddingGather(9, "bfloat16", max_batch=8, buffers=1, runtime=HostRuntime())
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
