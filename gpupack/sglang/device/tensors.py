"""What a step of the engine sampled, as inputs of the packer; all of it stays where it lies.

The strides of token ids and of logprobs differ under speculation: ids are as wide as the draft, logprobs as the
longest run that can be accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpupack.sglang.device.pool_handles import UnsupportedByDevice


def step_inputs(result: Any, rows: int, scores: bool, top: int) -> dict[str, Any]:
    """Arguments of `Packer.step` for a GenerationBatchResult of `rows` requests; nothing synchronises.

    `scores`: a request asked for logprobs; `top`: most top logprobs that one asked for. UnsupportedByDevice if the
    result does not have them as tensors of the batch.
    """
    ids = result.next_token_ids
    if not isinstance(ids, Tensor):
        raise UnsupportedByDevice("no sampled ids on the device")
    inputs: dict[str, Any] = {"token_ids": ids.reshape(-1)}
    if ids.numel() != rows:
        inputs |= _verified(result, ids, rows)
    if scores:
        inputs |= _logprobs(result.logits_output, rows, top)
    return inputs


def _verified(result: Any, ids: Tensor, rows: int) -> dict[str, Any]:
    """Padded runs of a verify step, `[B, T]`, and how much of each was accepted."""
    stride = result.speculative_output_stride or result.speculative_num_draft_tokens
    if result.accept_lens is None or not stride or ids.numel() != rows * stride:
        raise UnsupportedByDevice("sampled ids of an unknown shape")
    return {"token_ids": ids.reshape(rows, stride), "accept_lens": result.accept_lens.to(torch.int32)}


def _logprobs(output: Any, rows: int, top: int) -> dict[str, Any]:
    values = None if output is None else output.next_token_logprobs
    if not isinstance(values, Tensor) or len(values) != rows:
        raise UnsupportedByDevice("logprobs that are no tensor of the batch")
    inputs: dict[str, Any] = {"logprobs": values.float()}
    if top:
        width = values.shape[1] if values.ndim == 2 else 1
        values, ids = unsplit(output.next_token_top_logprobs_val), unsplit(output.next_token_top_logprobs_idx)
        if values is None or ids is None or len(values) != rows * width or values.shape[1] < top:
            raise UnsupportedByDevice("top logprobs that are no tensor of the batch")
        inputs["top_logprobs_val"] = values.float().reshape(rows, width, -1)
        inputs["top_logprobs_idx"] = ids.reshape(rows, width, -1)
    return inputs


def unsplit(views: Any) -> Tensor | None:
    """The `[n, k]` tensor of which `views` are the beginnings of its n rows; None if they are not.

    The engine takes the top k of the whole batch in one call, and a view of each row as long as its request asked.
    """
    if not views or not all(isinstance(view, Tensor) for view in views):
        return None
    first, last, count = views[0], views[-1], len(views)
    storage = first.untyped_storage()
    width, rest = divmod(storage.nbytes(), count * first.element_size())
    if rest or not width or last.storage_offset() != (count - 1) * width or first.storage_offset():
        return None
    if last.untyped_storage().data_ptr() != storage.data_ptr():
        return None
    return first.as_strided((count, width), (width, 1), 0)


def copy_top_logprobs(output: Any, copy: Any) -> tuple[list[Any], list[Any]] | None:
    """The engine's two lists of views, over one copy of each tensor instead of one of each view; None: as they are.

    `copy` is the engine's own function for a copy to the host on the current stream.
    """
    if output is None:
        return None
    lists = []
    for views in (output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx):
        whole = unsplit(views)
        if whole is None:
            return None
        host = copy(whole)
        lists.append([host[i, : len(view)] for i, view in enumerate(views)])
    return lists[0], lists[1]
