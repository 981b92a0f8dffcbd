"""A step of the life as arrays and control, as an engine hands them to the packer."""

from __future__ import annotations

from typing import Any

import numpy as np
from life import MAX_ACCEPT, Part, Step
from told import reason_of

from gpupack.core import layout as L
from gpupack.core.row_control import Control

MAX_TOP, MAX_IDS = 5, 3
POISON = 123_456


def lens_of(step: Step) -> Any:
    """Tokens that each row brings, int32 `[B]`."""
    return np.array([_brings(part) for part in step.parts], np.int32)


def _brings(part: Part) -> int:
    """A retracted request's token is discarded before gpupack sees it; what is skipped or late it leaves out itself."""
    if part.taken or part.req.is_retracted:
        return part.taken
    return int(part.stray is not None)


def control_of(step: Step, control: Control) -> Control:
    """What the requests' own state asks of their rows."""
    control.reset(len(step.parts))
    for row, part in enumerate(step.parts):
        req = part.req
        if req is step.skip:
            control.flags[row] |= L.CONTROL_SKIP
        if req.is_retracted:
            control.flags[row] |= L.CONTROL_RETRACTED
        if req.finished():
            _finish(control, row, req)
        elif req.check_match_stop_str_prefix():  # for the presets to ignore where the package does not look
            control.flags[row] |= L.CONTROL_HOLD
    return control


def _finish(control: Control, row: int, req: Any) -> None:
    reason = reason_of(req)
    code, match = L.FINISH_HOST, 0
    if reason["type"] == "length":
        code, match = L.FINISH_LENGTH, reason["length"]
    elif isinstance(reason.get("matched"), int):
        code, match = L.FINISH_STOP_TOKEN, reason["matched"]
    elif reason["type"] == "stop":
        code = L.FINISH_STOP_STRING
    control.finish(row, code, finished_len=-1 if req.finished_len is None else req.finished_len, match=match)


def inputs_of(step: Step, *, logprobs: bool) -> dict[str, Any]:
    """Arrays of `Packer.step` by name; what no row accepts is poisoned."""
    batch, width = len(step.parts), MAX_ACCEPT if step.verify else 1
    inputs: dict[str, Any] = {"token_ids": np.full((batch, width), POISON, np.int64)}
    if logprobs:
        inputs["logprobs"] = np.full((batch, width), 7.0, np.float32)
        inputs["top_logprobs_val"] = np.full((batch, width, MAX_TOP), 8.0, np.float32)
        inputs["top_logprobs_idx"] = np.full((batch, width, MAX_TOP), -8, np.int64)
        inputs["token_ids_logprobs_val"] = np.full((batch, width, MAX_IDS), 9.0, np.float32)
    if step.caps:
        inputs["block_accept_lens"] = np.array([part.block_accept for part in step.parts], np.int32)
        inputs["cap_lens"] = np.array([part.cap for part in step.parts], np.int32)
    for row, part in enumerate(step.parts):
        _fill(inputs, row, part)
    return inputs


def _fill(inputs: dict[str, Any], row: int, part: Part) -> None:
    req, n = part.req, part.taken
    if not n:
        if part.stray is not None:
            inputs["token_ids"][row, 0] = part.stray
        return
    inputs["token_ids"][row, :n] = req.output_ids[-n:]
    if not req.return_logprob:
        return
    log, k = req.logprob, req.logprob.top_logprobs_num
    inputs["logprobs"][row, :n] = log.output_token_logprobs_val[-n:]
    if k:
        inputs["top_logprobs_val"][row, :n, :k] = log.output_top_logprobs_val[-n:]
        inputs["top_logprobs_idx"][row, :n, :k] = log.output_top_logprobs_idx[-n:]
    if log.token_ids_logprob is not None:
        m = len(log.token_ids_logprob)
        inputs["token_ids_logprobs_val"][row, :n, :m] = log.output_token_ids_logprobs_val[-n:]
