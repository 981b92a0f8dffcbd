"""Which variant of the pack kernel a configuration launches: block size, warps, compile-time constants."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import ConfigError

BLOCK = 128  # rows a program, one a thread: the fewest sectors and instructions of what was counted (CUDA.md)
THREADS = 128
TILE = 512  # most items of all runs in a program; with more, registers spill
MAX_DEVICE_ACCEPT = 128  # the run of a row is one tile


class LaunchShape(NamedTuple):
    """Rows a program, warps a program, and most programs of a launch, a power of two."""

    block: int
    warps: int
    blocks: int


def launch_shape(
    config: PackerConfig, block: int | None = None, warps: int | None = None, lanes: int = 32
) -> LaunchShape:
    """The shape for a configuration on a device with warps of `lanes` threads; ConfigError if its runs are too long."""
    if config.max_accept > MAX_DEVICE_ACCEPT:
        raise ConfigError(f"max_accept: expected at most {MAX_DEVICE_ACCEPT} on a device, got {config.max_accept}")
    if block is None:
        block = min(BLOCK, TILE // power_of_two(config.max_accept))
    return LaunchShape(block, warps or THREADS // lanes, power_of_two(-(-config.batch_capacity // block)))


def kernel_constants(config: PackerConfig, shape: LaunchShape) -> dict[str, Any]:
    """The compile-time arguments of pack_kernel for a configuration."""
    return {
        "RING": config.buffers,
        "CONTROL_WORDS": ring_words(config)[0],
        "OUT_WORDS": ring_words(config)[1],
        "CAPACITY": config.capacity,
        "WINDOW": config.window,
        "MAX_ITEMS": config.max_items,
        "BACKLOG_LIMIT": config.backlog_limit,
        "VOCAB_SIZE": config.vocab_size,
        "POLICY": config.policy.bits,
        "LOGPROBS": config.logprobs,
        "MAX_ACCEPT": config.max_accept,
        "FAMILY_WIDTH": config.family_width,
        "FAMILY_WINDOW": config.family_positions,
        "FAMILY_LIMIT": config.family_limit,
        "SPEC_WIDTH": config.spec_width,
        "ACCEPT": power_of_two(config.max_accept),
        "SPEC_COLUMNS": power_of_two(config.spec_width),
        "BLOCK": shape.block,
        "BLOCKS": shape.blocks,
    }


def ring_words(config: PackerConfig) -> tuple[int, int]:
    """Words of a control block and of a packed step in their rings; buffers share no cache line of 128 bytes."""
    control = L.LAUNCH_WORDS + L.CONTROL_WIDTH * config.batch_capacity
    out = L.packed_layout(config.batch_capacity, config.packed_shape).size
    return _padded(control), _padded(out)


def _padded(words: int) -> int:
    return -(-words // 32) * 32


def power_of_two(number: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(number - 1, 0).bit_length()
