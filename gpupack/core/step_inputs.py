"""StepInputs: what a step takes in beside handles and control."""

from __future__ import annotations

from typing import Any, NamedTuple


class StepInputs(NamedTuple):
    """Arrays of one step, on the host or on the device; see `Packer.step` for shapes and dtypes."""

    token_ids: Any = None
    accept_lens: Any = None
    logprobs: Any = None
    top_logprobs_val: Any = None
    top_logprobs_idx: Any = None
    token_ids_logprobs_val: Any = None
    block_accept_lens: Any = None
    cap_lens: Any = None
    verify: bool | None = None
    """A verify step of speculative decoding; None: if there are `accept_lens`."""

    @property
    def is_verify(self) -> bool:
        """Whether the counters of speculative decoding go up."""
        return self.accept_lens is not None if self.verify is None else self.verify


NO_INPUTS = StepInputs()
