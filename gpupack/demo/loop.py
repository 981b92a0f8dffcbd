"""A small continuous-batching scheduler loop around a packer: what an engine's loop looks like.

Each iteration launches one step (decode of the running requests, prefill of the newly admitted) and
packs its output, and only then sends the output of the step before: the overlap schedule. Nothing in
it waits for the device except the take-in of the previous packed step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpupack.core.request import Request
from gpupack.demo.model import SlotModel
from gpupack.demo.prompts import Prompt
from gpupack.demo.sampling import sample
from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket
from gpupack.streamer.output_streamer import OutputStreamer, SendReport


@dataclass
class LoopStats:
    """What the loop measured, in nanoseconds: whole iterations, and launch plus send of the output."""

    step_ns: list[int] = field(default_factory=list)
    pack_ns: list[int] = field(default_factory=list)
    frame_bytes: int = 0
    rows: int = 0

    def count(self, report: SendReport, began: int, packing: int) -> None:
        """Add one iteration that began at `began` and spent `packing` ns on output."""
        self.rows += report.rows
        self.frame_bytes += report.frame_bytes
        self.pack_ns.append(packing)
        self.step_ns.append(time.perf_counter_ns() - began)


class SchedulerLoop:
    """Runs prompts through a model, at most `capacity` of the packer at a time."""

    def __init__(self, model: SlotModel, streamer: OutputStreamer, *, seed: int = 0) -> None:
        self.model = model
        self.streamer = streamer
        self.packer: Packer = streamer.packer
        self.stats = LoopStats()
        self.sampled: dict[str, list[int]] = {}  # every token the model sampled, late ones included
        self._generator = torch.Generator(model.info.device).manual_seed(seed)
        slots = self.packer.config.capacity
        self._last_token = torch.zeros(slots, dtype=torch.int64, device=model.info.device)
        self._temperature = torch.zeros(slots, device=model.info.device)
        self._running = np.empty(0, np.int64)
        self._history: list[tuple[NDArray[np.int64], Tensor]] = []
        self._rids: dict[int, str] = {}

    def run(self, prompts: Sequence[Prompt], on_step: Callable[[], None] = lambda: None) -> None:
        """Serve all prompts; `on_step` is called once an iteration."""
        waiting = deque(prompts)
        in_flight: Ticket | None = None
        while waiting or len(self._running) or in_flight is not None:
            began = time.perf_counter_ns()
            launched, packing = self._launch(waiting)
            if in_flight is not None:
                start = time.perf_counter_ns()
                report = self.streamer.send(in_flight)
                self._end(report.finished)
                self.stats.count(report, began, packing + time.perf_counter_ns() - start)
            in_flight = launched
            on_step()
        self._collect()

    def _launch(self, waiting: deque[Prompt]) -> tuple[Ticket | None, int]:
        """Launch decode and prefill and pack their output; also the ns that packing took."""
        decoding = self._running
        handles, prompts = self._admit(waiting)
        batch = np.concatenate([decoding, handles])
        if not len(batch):
            return None, 0
        logits = []
        if len(decoding):
            slots = _slots(decoding)
            logits.append(self.model.decode(slots, self._last_token[slots]))
        if len(handles):
            logits.append(self.model.prefill(_slots(handles), prompts))
        slots = _slots(batch)
        token_ids, logprobs = sample(torch.cat(logits), self._temperature[slots], self._generator)
        self._last_token[slots] = token_ids
        self._history.append((batch, token_ids))
        start = time.perf_counter_ns()
        ticket = self.packer.step(batch, token_ids, logprobs=logprobs)
        packing = time.perf_counter_ns() - start
        self._running = batch
        return ticket, packing

    def _admit(self, waiting: deque[Prompt]) -> tuple[NDArray[np.int64], list[list[int]]]:
        free = self.packer.slots.free
        prompts = [waiting.popleft() for _ in range(min(free, len(waiting)))]
        encoded = [self.model.encode_chat(prompt.text) for prompt in prompts]
        handles = self.streamer.admit([_request(p, ids) for p, ids in zip(prompts, encoded, strict=True)])
        self._rids |= {handle: prompt.rid for handle, prompt in zip(handles.tolist(), prompts, strict=True)}
        if prompts:
            self._temperature[_slots(handles)] = torch.tensor(
                [prompt.temperature for prompt in prompts], device=self._temperature.device
            )
        return handles, encoded

    def _end(self, finished: NDArray[np.int64]) -> None:
        """Take finished requests out of the batch; the step in flight still has them, and is ignored."""
        if len(finished):
            self._running = self._running[~np.isin(self._running, finished)]
            self.streamer.retire(finished)

    def _collect(self) -> None:
        """Bring the sampled tokens to the host, for the check at the end; not part of serving."""
        for handles, token_ids in self._history:
            for handle, token in zip(handles.tolist(), token_ids.tolist(), strict=True):
                self.sampled.setdefault(self._rids[handle], []).append(token)
        self._history.clear()


def _slots(handles: NDArray[np.int64]) -> Tensor:
    """Slots of handles, int64 `[n]` on the host: a packer's slot is also its cache row in the model."""
    return torch.from_numpy(handles & 0xFFFFFFFF)


def _request(prompt: Prompt, token_ids: list[int]) -> Request:
    return Request(
        prompt.rid,
        token_ids,
        max_new_tokens=prompt.max_new_tokens,
        stream=prompt.stream,
        stream_interval=prompt.stream_interval,
        stop=prompt.stop,
        return_logprob=True,
    )
