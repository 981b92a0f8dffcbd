"""What a step of a life sampled, as the engine has it on its device: its own result classes, its own request pool."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
from life import DRAFTS, Life, Part, Step
from newcomers import VOCAB
from real import NEWER, runtime_context, shared_args

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

DISCARDED = 2  # tokens at the end of an accepted run that the engine does not commit
TOKENS, SCORES = DRAFTS + 1 + DISCARDED + 1, DRAFTS + 1 + DISCARDED  # strides of a verify step


class Sampled:
    """Makes batch and result of each step of a life, and the scheduler around them."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.pool = ReqToTokenPool(64, 8, "cpu", False)
        self.scheduler = SimpleNamespace(
            enable_async_d2h_copy=False,
            device="cpu",
            spec_algorithm=SimpleNamespace(is_none=lambda: not life.setting.speculative),
            disaggregation_mode=SimpleNamespace(name="DECODE" if life.setting.decode_server else "NULL"),
            model_config=SimpleNamespace(vocab_size=VOCAB),
            req_to_token_pool=self.pool,
        )
        if NEWER:
            shared_args()
            runtime_context.get_context().override("tests", speculative_num_draft_tokens=TOKENS - 1)
        self._index: dict[str, int] = {}
        self._tokens: dict[str, list[int]] = {}
        self._take, life.outputs.take = life.outputs.take, self._taken

    def _taken(self, req: Any, tokens: list[int], *, first: bool = False) -> None:
        self._tokens[req.rid] = tokens
        self._take(req, tokens, first=first)

    def of(self, step: Step) -> tuple[Any, Any] | None:
        """Batch and result; None for a step in which nothing was sampled."""
        parts = step.parts
        if not parts or not all(part.taken or part.stray is not None for part in parts):
            return None
        for part in parts:
            if part.req.rid not in self._index:
                (self._index[part.req.rid],) = self.pool.alloc_rows(1)
        indices = torch.tensor([self._index[part.req.rid] for part in parts])
        batch = SimpleNamespace(reqs=step.reqs, req_pool_indices_cpu=indices)
        return batch, self._result(parts, step.verify, any(req.return_logprob for req in step.reqs))

    def leave(self, step: Step) -> None:
        """Give back the indices of requests that leave, or were retracted."""
        for req in (*step.gone, *step.retracted):
            if req.rid in self._index:
                self.pool.free_rows([self._index.pop(req.rid)])

    def _result(self, parts: list[Part], verify: bool, scores: bool) -> Any:
        rng, n = np.random.default_rng(len(self._tokens)), len(parts)
        width, depth = (TOKENS, SCORES) if verify else (1, 1)
        ids, values = rng.integers(0, VOCAB, (n, width)), rng.standard_normal((n, depth), np.float32)
        most = max((part.req.logprob.top_logprobs_num for part in parts if part.req.return_logprob), default=0)
        top = rng.standard_normal((n, depth, most), np.float32), rng.integers(0, VOCAB, (n, depth, most))
        lens = np.ones(n, np.int32)
        for row, part in enumerate(parts):
            run = self._tokens[part.req.rid] if part.taken else [part.stray]
            ids[row, : len(run)] = run
            lens[row] = len(run) + (int(rng.integers(0, DISCARDED + 1)) if verify else 0)
            self._scores(part, values[row], top[0][row], top[1][row])
        output = LogitsProcessorOutput(next_token_logits=None)
        if scores:
            output.next_token_logprobs = torch.from_numpy(values if verify else values[:, 0])
        if most:
            nums = [part.req.logprob.top_logprobs_num if part.req.return_logprob else 0 for part in parts]
            split = [
                [whole[i][: nums[i // depth]] for i in range(n * depth)]
                for whole in (torch.from_numpy(one.reshape(n * depth, most)) for one in top)
            ]
            output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx = split
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=torch.from_numpy(ids.reshape(-1)),
            accept_lens=torch.from_numpy(lens) if verify else None,
            speculative_num_draft_tokens=TOKENS if verify else None,
        )

    def _scores(self, part: Part, values: Any, top_val: Any, top_idx: Any) -> None:
        """Put in what the life has made up for the tokens that were committed."""
        log, k = part.req.logprob, part.taken
        if not (part.req.return_logprob and k):
            return
        values[:k] = log.output_token_logprobs_val[-k:]
        if log.top_logprobs_num:
            top_val[:k, : log.top_logprobs_num] = log.output_top_logprobs_val[-k:]
            top_idx[:k, : log.top_logprobs_num] = log.output_top_logprobs_idx[-k:]
