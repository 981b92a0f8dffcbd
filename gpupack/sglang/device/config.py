"""Whether an engine's steps can be packed on its device, and the packer's sizes for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gpupack.core.config import PackerConfig
from gpupack.sglang.device.backlog import RECORD_WINDOW
from gpupack.sglang.device.pool_handles import MAX_TOP_LOGPROBS

IN_FLIGHT = 4
DEVICES = ("cuda", "cpu")


def why_not_here(scheduler: Any, sender: Any) -> str | None:
    """Why no step of this engine is packed on its device; None: they are. `sender` is its streamer's."""
    if getattr(sender, "socket", sender) is None:
        return "a rank without a socket"
    if scheduler.disaggregation_mode.name != "NULL":
        return "disaggregation"  # results wait for a transfer, and come in the order of the transfers
    if scheduler.enable_async_d2h_copy:
        return "confidential computing"  # a thread of its own copies the results
    if device_of(scheduler) not in DEVICES:
        return f"device {device_of(scheduler)}"
    if not hasattr(scheduler.req_to_token_pool, "req_generation"):
        return "a pool without generations"
    if _longest_run(scheduler) >= RECORD_WINDOW:
        return f"{RECORD_WINDOW} draft tokens or more"
    return None


def config_of(scheduler: Any, capacity: int) -> PackerConfig:
    """The packer's configuration for a request pool of `capacity`; nothing stays unsent on the device."""
    accept = _longest_run(scheduler)
    window = 1 << accept.bit_length()
    return PackerConfig(
        vocab_size=scheduler.model_config.vocab_size,
        capacity=capacity,
        window=window,
        family_window=window,
        max_accept=accept,
        max_in_flight=IN_FLIGHT,
        max_top_logprobs=MAX_TOP_LOGPROBS,
        device=device_of(scheduler),  # type: ignore[arg-type]
    )


def device_of(scheduler: Any) -> str:
    """The kind of device: "cuda" also for HIP."""
    return str(scheduler.device).partition(":")[0]


def _longest_run(scheduler: Any) -> int:
    """Most tokens that a step accepts for a request: the draft, and a root in front of it."""
    if scheduler.spec_algorithm.is_none():
        return 1
    context = import_module("sglang.srt.runtime_context")
    return int(context.max_speculative_num_draft_tokens() or 0) + 1
