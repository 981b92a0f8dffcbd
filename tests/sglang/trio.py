"""Three streamers side by side: the real one, ours under its preset, ours by the default policy."""

from __future__ import annotations

import warnings
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from life import Part, Step
from newcomers import VOCAB
from ours import PRESET, Ours
from real import RealStreamer, Setting

from gpupack import EmitPolicy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams


class Row(NamedTuple):
    """What a row says of its request; `logprobs` is None where the column is absent."""

    rid: str
    output_ids: list[int]
    completion_tokens: int
    logprobs: list[float] | None
    finished: bool


class Rows(NamedTuple):
    """The rows of one step by each of the three; None: no message."""

    real: list[Row] | None
    preset: list[Row] | None
    default: list[Row] | None


class Trio:
    """Give each step to all three."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.real = RealStreamer(setting)
        self.preset = Ours(setting, f"ipc://{folder}/preset", PRESET)
        self.default = Ours(setting, f"ipc://{folder}/default", EmitPolicy())

    def __enter__(self) -> Trio:
        return self

    def __exit__(self, *error: object) -> None:
        self.preset.__exit__()
        self.default.__exit__()

    def step(self, *parts: Part, return_logprob: bool = False, verify: bool = False, **more: Any) -> Rows:
        """A step of these requests."""
        step = Step(list(parts), return_logprob=return_logprob, verify=verify, **more)
        self.preset.send(step)
        self.default.send(step)
        real = self.real.stream(step.reqs, return_logprob, step.skip)
        return Rows(_rows(real), _rows(self.preset.receive()), _rows(self.default.receive()))


def _rows(message: Any) -> list[Row] | None:
    if message is None:
        return None
    scores = message.output_token_logprobs_val or [None] * len(message.rids)
    columns = zip(
        message.rids, message.output_ids, message.completion_tokens, scores, message.finished_reasons, strict=True
    )
    return [Row(rid, list(ids), n, score, reason is not None) for rid, ids, n, score, reason in columns]


def make(rid: str, tokenizer: Any = None, *, return_logprob: bool = False, stream: bool = True, **sampling: Any) -> Any:
    """A request that samples what the test says."""
    params = SamplingParams(**{"max_new_tokens": 100_000, "ignore_eos": True, **sampling})
    params.normalize(tokenizer)
    req = Req(
        rid, "", array("q", [5, 6, 7]), params, return_logprob=return_logprob, stream=stream, vocab_size=VOCAB,
        eos_token_ids=set(),
    )  # fmt: skip
    req.tokenizer = tokenizer
    return req


def take(req: Any, *tokens: int) -> Part:
    """Let a request accept tokens, their logprobs minus the output length with them."""
    before = len(req.output_ids)
    req.output_ids.extend(tokens)
    req.update_finish_state(len(tokens))
    if req.return_logprob:
        req.logprob.output_token_logprobs_val += [-float(before + i + 1) for i in range(len(tokens))]
        req.logprob.output_token_logprobs_idx += tokens
        req.logprob.input_token_logprobs_val = req.logprob.input_token_logprobs_val or []
        req.logprob.input_token_logprobs_idx = req.logprob.input_token_logprobs_idx or []
    return Part(req, taken=len(tokens))
