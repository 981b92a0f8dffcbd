"""BatchMembership: the requests of a batch, and what stays as it is of them while the batch is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class BatchMembership:
    """Made by `RequestStates.membership_of`; a request's slot is its place in RequestStates.

    Attributes
    ----------
    reqs
        The requests, kept alive.
    slots, generation
        int32 `[n]`; see RequestStates.
    why
        Reason for which one of them goes through the engine's own streamer; None: all are covered.
    wanted
        uint8 `[n]`, see RequestStates.
    widths
        int32 `[n, 2]`, see RequestStates.
    width
        The row of `widths` that is every request's, all of which want logprobs; None: they differ.
    prefill_known, input_logprobs_sent
        Every request's columns of PREFILL_COLUMNS stand; every request's input logprobs have been sent, or will not be.
    """

    __slots__ = (
        "generation",
        "input_logprobs_sent",
        "prefill_known",
        "reqs",
        "slots",
        "wanted",
        "why",
        "width",
        "widths",
    )

    def __init__(
        self,
        reqs: list[Any],
        slots: NDArray[np.int32],
        generation: NDArray[np.int32],
        why: str | None,
        wanted: NDArray[np.uint8],
        widths: NDArray[np.int32],
        *,
        scored: bool,
    ) -> None:
        self.reqs, self.slots, self.generation, self.why = reqs, slots, generation, why
        self.wanted, self.widths = wanted, widths
        same = scored and len(reqs) and bool((widths == widths[0]).all())
        self.width: tuple[int, int] | None = tuple(widths[0].tolist()) if same else None
        self.prefill_known = self.input_logprobs_sent = False
