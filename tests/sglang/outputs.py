"""What the package's batch result processor collects in a request with the tokens that it accepts."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from newcomers import VOCAB
from real import NEWER

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

THINK_END = 7  # id that ends the reasoning
ODD_LOGPROBS = (-np.inf, np.nan, -0.0)


class Outputs:
    """Random outputs of a model, of every kind that a request can ask for."""

    def __init__(self, rng: np.random.Generator, *, speculative: bool) -> None:
        self.rng = rng
        # As the package does it: one value a step, however many tokens it accepts. Else as a model might.
        self.custom_per_step = speculative and rng.random() < 0.5
        self.custom_keys = ("route", "score")[: int(rng.integers(0, 3))]

    def take(self, req: Any, tokens: list[int], *, first: bool = False) -> None:
        """What the result processor does with accepted tokens."""
        req.output_ids.extend(tokens)
        if req.require_reasoning:
            req.update_reasoning_tokens(tokens, [THINK_END] if NEWER else THINK_END)
        req.update_finish_state(len(tokens))
        if req.finished():
            self._collect_at_end(req)
        self._custom(req, 1 if self.custom_per_step else len(tokens))
        if req.return_logprob:
            if first and req.logprob.input_token_logprobs_val is None:
                self._input_logprobs(req)
            self._logprobs(req, tokens)
        if req.return_hidden_states:
            states = self.rng.standard_normal((len(tokens), 3), dtype=np.float32).tolist()
            req.hidden_states.extend([[state] for state in states] if first else states)

    def _floats(self, *shape: int) -> Any:
        values = -self.rng.exponential(2.0, shape).astype(np.float32)
        odd = self.rng.random(shape) < 0.02
        values[odd] = self.rng.choice(ODD_LOGPROBS, int(odd.sum()))
        return values.tolist()

    def _logprobs(self, req: Any, tokens: list[int]) -> None:
        log, n = req.logprob, len(tokens)
        log.output_token_logprobs_val += self._floats(n)
        log.output_token_logprobs_idx += tokens
        k = log.top_logprobs_num
        if k:
            log.output_top_logprobs_val += self._floats(n, k)
            log.output_top_logprobs_idx += self.rng.integers(0, VOCAB, (n, k)).tolist()
        if log.token_ids_logprob is not None:
            log.output_token_ids_logprobs_val += self._floats(n, len(log.token_ids_logprob))
            log.output_token_ids_logprobs_idx += [log.token_ids_logprob] * n

    def _input_logprobs(self, req: Any) -> None:
        log, prompt = req.logprob, req.origin_input_ids.tolist()
        start = int(self.rng.choice([0, len(prompt) // 2, len(prompt)]))
        ids, n = prompt[start:], max(len(prompt) - start - 1, 0)
        if not ids:
            for name in ("token", "top", "token_ids"):
                setattr(log, f"input_{name}_logprobs_val", [])
                setattr(log, f"input_{name}_logprobs_idx", [])
            return
        log.input_token_logprobs_val, log.input_token_logprobs_idx = [None, *self._floats(n)], ids
        k = log.top_logprobs_num
        if k:
            log.input_top_logprobs_val = [None, *self._floats(n, k)]
            log.input_top_logprobs_idx = [None, *self.rng.integers(0, VOCAB, (n, k)).tolist()]
        wanted = log.token_ids_logprob
        if wanted is not None:
            log.input_token_ids_logprobs_val = [None, *self._floats(n, len(wanted))]
            log.input_token_ids_logprobs_idx = [None, *[wanted] * n]

    def _custom(self, req: Any, n: int) -> None:
        for key in self.custom_keys:
            if self.rng.random() < 0.3 and not (req.customized_info or {}).get(key):
                continue
            if req.customized_info is None:
                req.customized_info = {}
            values = [round(float(x), 3) for x in self.rng.random(n)]
            req.customized_info.setdefault(key, []).extend(values)

    def _collect_at_end(self, req: Any) -> None:
        rows = len(req.origin_input_ids) + len(req.output_ids_through_stop) - 1
        if req.return_routed_experts and self.rng.random() < 0.9:
            req.routed_experts = torch.from_numpy(self.rng.integers(0, 64, (rows, 2, 4)).astype(np.int32))
        if req.return_indexer_topk:
            req.indexer_topk = torch.from_numpy(self.rng.integers(0, 999, (rows, 1, 3)).astype(np.int32))
        if self.rng.random() < 0.5:
            self._times(req)

    def _times(self, req: Any) -> None:
        stats = req.time_stats
        stats.enable_metrics = True
        stats.wait_queue_entry_time, stats.forward_entry_time = (float(t) for t in self.rng.random(2))
