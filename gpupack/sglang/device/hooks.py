"""Where the device backend sits in the engine's scheduler process; `docs/integration.md` says which stream is current.

| hook | when |
| --- | --- |
| RELAY | with the overlap schedule: the sampled tokens are handed to the next step, on the forward stream |
| COPY | with the overlap schedule: the result is copied to the host, on the copy stream |
| PREFILL_COLUMNS | without it: both |
| PROCESS | the result is on the host, and its batch goes to the streamer |
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gpupack.sglang.device.backend import DeviceBackend, DeviceStep
from gpupack.sglang.device.tensors import copy_top_logprobs

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RELAY = f"{SCHEDULER}._relay_forward_payload"
COPY = "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu"
PREFILL_COLUMNS = f"{SCHEDULER}.update_cache_from_scheduler"
PROCESS = f"{SCHEDULER}.process_batch_result"


def hook_device() -> None:
    """Register the hooks; they do nothing in a scheduler whose streamer has no device backend."""
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    copy = import_module("sglang.srt.utils.common").async_d2h

    def around_copy(original: Any, result: Any, *arguments: Any, **options: Any) -> Any:
        return around_copying(original, copy, result, *arguments, **options)

    around = {RELAY: around_relay, COPY: around_copy, PREFILL_COLUMNS: around_settled, PROCESS: around_process}
    for target, hook in around.items():
        hooks.HookRegistry.register(target, hook, hooks.HookType.AROUND)


def backend_of(scheduler: Any) -> DeviceBackend | None:
    """The device backend of a scheduler's streamer; None: it has none."""
    ours = getattr(getattr(scheduler, "output_streamer", None), "gpupack", None)
    backend: DeviceBackend | None = getattr(ours, "device", None)
    return backend


def around_relay(original: Any, scheduler: Any, batch: Any, future_indices: Any, batch_result: Any) -> Any:
    """`Scheduler._relay_forward_payload`."""
    answer = original(scheduler, batch, future_indices, batch_result)
    backend = backend_of(scheduler)
    if backend is not None and scheduler.enable_overlap:
        backend.relayed(batch, batch_result)
    return answer


def around_copying(original: Any, copy: Any, result: Any, *arguments: Any, **options: Any) -> Any:
    """`GenerationBatchResult.copy_to_cpu`; `copy` is what it copies a tensor with."""
    step: DeviceStep | None = getattr(result, "gpupack", None)
    if step is None:
        return original(result, *arguments, **options)
    step.backend.copied(step)
    output = result.logits_output
    rows = copy_top_logprobs(output, copy)
    if rows is not None:
        output.next_token_top_logprobs_val = output.next_token_top_logprobs_idx = None
    answer = original(result, *arguments, **options)
    if rows is not None:
        output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx = rows
    return answer


def around_settled(original: Any, scheduler: Any, schedule_batch: Any, batch_result: Any) -> Any:
    """`Scheduler.update_cache_from_scheduler`: the only call without overlap that has both."""
    answer = original(scheduler, schedule_batch, batch_result)
    backend = backend_of(scheduler)
    if backend is not None:
        backend.relayed(schedule_batch, batch_result)
        backend.copied(batch_result.gpupack)
    return answer


def around_process(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
    """`Scheduler.process_batch_result`."""
    backend = backend_of(scheduler)
    if backend is None:
        return original(scheduler, batch, result)
    backend.begin(batch, result)
    try:
        return original(scheduler, batch, result)
    finally:
        backend.end()
