"""A random life of the scheduler on real requests, one step at a time.

Each request is left as the package's batch result processor would leave it: tokens first, then its own
`update_finish_state`, then what is collected with them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from newcomers import VOCAB, Newcomers
from outputs import THINK_END, Outputs
from real import Setting

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

MAX_ACCEPT = 8  # tokens that a step may accept
DRAFTS = 3
MOST_RUNNING = 16
WAYS = (
    "idle", "aborted in the queue", "prefill chunk", "mixed batch", "verify step", "seen again", "retracted",
    "retracted in the batch", "retracted before its first token", "taken up again", "scored", "aborted",
    "invalid token", "logprobs wait", "held_rows", "late_rows", "finished",
)  # fmt: skip


@dataclass
class Part:
    """A request in the batch of a step: how many tokens it took in, and one that is not output."""

    req: Any
    taken: int = 0
    block_accept: int = 0
    cap: int = 0
    stray: int | None = None


@dataclass
class Step:
    """What the streamer is called with after a step, and what happened in it."""

    parts: list[Part] = field(default_factory=list)
    return_logprob: bool = False
    skip: Any = None
    idle: bool = False
    verify: bool = False
    caps: bool = False
    """There are block_accept_lens and cap_lens."""
    gone: list[Any] = field(default_factory=list)
    """Requests that leave the engine after this step."""
    retracted: list[Any] = field(default_factory=list)
    """Requests that go back to the queue, whether or not they are in this batch."""

    @property
    def reqs(self) -> list[Any]:
        return [part.req for part in self.parts]


class Life:
    """Steps of one engine; `rng` decides everything."""

    def __init__(self, rng: np.random.Generator, setting: Setting, tokenizer: Any, name: str = "") -> None:
        self.rng, self.setting = rng, setting
        self.newcomers = Newcomers(rng, setting, tokenizer, name)
        self.chance = self.newcomers.chance
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.leaving: list[Any] = []  # finished, and seen once more by the overlap schedule
        self.chunked: Any = None
        self.chunks = 0
        self.place: dict[str, int] = {}  # where a request stands in the newcomers' text
        self.overlap = self.chance(0.5)
        self.events: Counter[str] = Counter()
        self.outputs = Outputs(rng, speculative=setting.speculative)

    def step(self) -> Step:
        """The next step."""
        if self.chance(0.03):
            self.events["idle"] += 1
            return Step(idle=True)
        if self.chance(0.06):
            return self._abort_queued()
        prefill = self.chance(0.3) or not (self.running or self.leaving)
        step = self._prefill() if prefill else self._decode()
        asked = any(req.return_logprob for req in step.reqs)
        step.return_logprob = self.setting.logprobs and asked != self.chance(0.12)
        self.events["logprobs wait"] += asked and not step.return_logprob
        return step

    # --- kinds of steps ---------------------------------------------------------------------------

    def _abort_queued(self) -> Step:
        req = self.newcomers.make()
        self.events["aborted in the queue"] += 1
        req.finished_reason = FINISH_ABORT("Aborted in the queue", 503, "Busy")
        return Step([Part(req)], return_logprob=req.return_logprob, gone=[req])

    def _prefill(self) -> Step:
        step = Step()
        if len(self.running) < MOST_RUNNING:
            self.waiting += [self.newcomers.make() for _ in range(int(self.rng.integers(1, 5)))]
        for _ in range(min(len(self.waiting), int(self.rng.integers(1, 6)))):
            req = self.waiting.pop(int(self.rng.integers(len(self.waiting))))
            if self.chance(0.05):
                step.parts += self._retract(step, req)  # before its prefill has come back
                break
            req.is_retracted = False
            if self.chunked is None and self.chance(0.25):
                self.chunked, self.chunks = req, int(self.rng.integers(1, 4))
            else:
                step.parts.append(self._first(req))
        if self.chunked is not None:
            step.parts.insert(int(self.rng.integers(len(step.parts) + 1)), self._chunk(step))
        if self.running and self.chance(0.3):  # decoding requests in the same batch
            self.events["mixed batch"] += 1
            step.parts += self._decoded(step, 1) + self._seen_again(step)
        self._prefill_columns(step)
        return step

    def _chunk(self, step: Step) -> Part:
        req = self.chunked
        if self.chunks:
            self.chunks -= 1
            self.events["prefill chunk"] += 1
            step.skip = req
            return Part(req, stray=self._sample(req))
        self.chunked = None
        return self._first(req)

    def _first(self, req: Any) -> Part:
        """A prefill that ends: the first token, or the next after a retraction."""
        self.events["taken up again"] += req.retraction_count > 0
        self._take(req, [self._sample(req)], first=True)
        return Part(req, taken=1)

    def _decode(self) -> Step:
        step = Step(verify=self.setting.speculative)
        step.caps = step.verify and self.chance(0.7)
        self.events["verify step"] += step.verify
        victim = self.running[int(self.rng.integers(len(self.running)))] if self.running else None
        retracted = self._retract(step, victim) if victim is not None and self.chance(0.1) else []
        step.parts = self._decoded(step, DRAFTS + 1 if step.verify else 1) + self._seen_again(step) + retracted
        self._prefill_columns(step)
        return step

    def _decoded(self, step: Step, most: int) -> list[Part]:
        parts = []
        for req in self.running:
            n = int(self.rng.integers(1, most + 1))
            part = Part(req, taken=n)
            if self.chance(0.02):
                self.events["aborted"] += 1
                req.to_finish = FINISH_ABORT("Asked to stop", 499, "Client")
            if step.verify:
                self._verified(req, part, step.caps)
            self._take(req, [self._sample(req) for _ in range(n)])
            parts.append(part)
        return parts

    def _verified(self, req: Any, part: Part, caps: bool) -> None:
        req.spec_verify_ct += 1
        req.spec_num_correct_drafts += part.taken - 1
        req.update_spec_correct_drafts_histogram(part.taken - 1)
        if caps:
            part.block_accept = int(self.rng.integers(0, DRAFTS + 2))
            part.cap = int(self.rng.integers(0, DRAFTS + 2))
            req.spec_num_block_accept_tokens += part.block_accept
            req.spec_num_cap_tokens += part.cap
            req.update_spec_cap_lens_histogram(part.cap)

    def _seen_again(self, step: Step) -> list[Part]:
        """Finished requests that the overlap schedule shows once more, with a token that is not output."""
        parts = [Part(req, stray=self._sample(req)) for req in self.leaving]
        step.gone += self.leaving
        self.events["seen again"] += len(parts)
        self.leaving = []
        return parts

    def _retract(self, step: Step, req: Any) -> list[Part]:
        """Take a request out; with the overlap schedule it may still be in the batch, its token discarded."""
        if req in self.running:
            self.running.remove(req)
        self.waiting.append(req)
        step.retracted.append(req)
        req.reset_for_retract()
        self.events["retracted"] += 1
        if not (self.overlap and self.chance(0.7)):
            return []
        self.events["retracted in the batch" if req.output_ids else "retracted before its first token"] += 1
        return [Part(req, stray=self._sample(req))]

    def _prefill_columns(self, step: Step) -> None:
        """Who runs on, who leaves."""
        for part in step.parts:
            req = part.req
            if req.finished():
                if req in self.running:
                    self.running.remove(req)
                if req not in step.gone:
                    (self.leaving if self.overlap else step.gone).append(req)
            elif req not in self.running and req is not step.skip and not req.is_retracted:
                self.running.append(req)

    # --- one request ------------------------------------------------------------------------------

    def _sample(self, req: Any) -> int:
        text = self.newcomers.text
        if self.chance(0.15) or req.rid not in self.place:
            self.place[req.rid] = int(self.rng.integers(len(text)))
        self.place[req.rid] = (self.place[req.rid] + 1) % len(text)
        if self.chance(0.004) and not req.return_logprob:  # the package would report the id that it replaced
            self.events["invalid token"] += 1
            return int(self.rng.choice([-1, VOCAB, VOCAB + 5]))
        if self.chance(0.01):
            return THINK_END
        return text[self.place[req.rid]]

    def _take(self, req: Any, tokens: list[int], *, first: bool = False) -> None:
        self.outputs.take(req, tokens, first=first)
        self.events["scored"] += req.finished_len == 0 and req.return_logprob
