"""The same life on gpupack: every request engine-judged, what the `Req`s say as control, real zmq."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from arrays import MAX_IDS, MAX_TOP, control_of, inputs_of, lens_of
from life import MAX_ACCEPT, Step
from newcomers import VOCAB
from real import NEWER, Setting
from told import Told, counts_of, reason_of, request_of

from gpupack import EmitPolicy, OutputReceiver, OutputSender, OutputStreamer, Packer, PackerConfig, Request
from gpupack.core.row_control import Control
from gpupack.transport.message_columns import OutputColumns

CAPACITY, WINDOW = 64, 512
PRESET = EmitPolicy.sglang_0_5_23() if NEWER else EmitPolicy.sglang_0_5_16()


@dataclass
class Known:
    """A request that gpupack knows; without a handle while it is retracted."""

    request: Request
    told: Told = field(default_factory=Told)
    handle: int = -1
    resume: Any = None


class Ours:
    """One engine of gpupack; `send` takes a step, `receive` gives its columns, or None without a message."""

    def __init__(self, setting: Setting, endpoint: str, policy: EmitPolicy = PRESET, **more: Any) -> None:
        self.setting = setting
        config = PackerConfig(
            vocab_size=VOCAB, capacity=CAPACITY, window=WINDOW, family_window=WINDOW, max_accept=MAX_ACCEPT,
            stream_interval=setting.stream_interval, logprobs=setting.logprobs, speculative=setting.speculative,
            max_top_logprobs=MAX_TOP if setting.logprobs else 0,
            max_token_ids_logprobs=MAX_IDS if setting.logprobs else 0, policy=policy,
        )  # fmt: skip
        self.receiver = OutputReceiver(endpoint)
        self.streamer = OutputStreamer(
            Packer(config, convey=False),
            OutputSender(endpoint, dp_rank=setting.dp_rank),
            whole_hidden_states=True,
            disaggregated_decode=setting.decode_server,
            attn_tp_rank=setting.attn_tp_rank,
            **more,
        )
        self.control = Control(CAPACITY)
        self.known: dict[str, Known] = {}
        self._sent = False
        self.newest: Any = None

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *error: object) -> None:
        self.streamer.close()
        self.receiver.close()

    def send(self, step: Step) -> None:
        """Take in a step and send what is due; to be called before the real streamer moves its own cursors."""
        self._admit(step)
        for req in step.reqs:
            news = self.known[req.rid].told.news(req, self.setting)
            if news:
                self.streamer.attach(self.known[req.rid].handle, **news)
            if req.finished():
                self.known[req.rid].request.finish_reason = reason_of(req)
        handles = np.array([self.known[req.rid].handle for req in step.reqs], np.int64)
        if step.parts:
            self.streamer.set_counts(handles, **counts_of(step.reqs))
        control = control_of(step, self.control)
        inputs = inputs_of(step, logprobs=self.setting.logprobs)
        lens = lens_of(step)
        counted = {"accept_lens": lens} if step.verify or not self.setting.speculative else {}
        if counted or lens.all():
            ticket = self.streamer.packer.step(
                handles, **inputs, **counted, control=control, return_logprob=step.return_logprob
            )
            report = self.streamer.send(ticket, idle=step.idle)
        else:  # rows without a token in a step that verifies nothing
            rows = [row for row, part in enumerate(step.parts) if part.taken]
            taken = {name: array[rows] for name, array in inputs.items()}
            if rows:
                assert not self.streamer.send(self.streamer.packer.append(handles[rows], **taken)).rows
            skip = self.known[step.skip.rid].handle if step.skip is not None else None
            report = self.streamer.stream_output(handles, step.return_logprob, skip, control=control)
        self._sent = report.frame_bytes > 0
        self._end(step)

    def receive(self) -> OutputColumns | None:
        """The columns of the message of the newest step."""
        if not self._sent:
            return None
        received = self.receiver.recv(10_000)
        assert received is not None, "a frame was sent and none came"
        self.newest = received
        return OutputColumns.of(received)

    def _admit(self, step: Step) -> None:
        for part in step.parts:
            entry = self.known.get(part.req.rid)
            if entry is None:
                entry = self.known[part.req.rid] = Known(request_of(part.req))
            if entry.handle < 0:
                (entry.handle,) = self.streamer.admit([entry.request], [entry.resume]).tolist()
                entry.resume = None

    def _end(self, step: Step) -> None:
        """Retire those that are gone; of those retracted some give up their handle until they come back."""
        gone = [self.known.pop(req.rid).handle for req in step.gone]
        if gone:
            self.streamer.retire(np.array(gone, np.int64))
        for req in step.retracted:
            entry = self.known.get(req.rid)
            if entry is not None and entry.handle >= 0 and int(req.rid.rpartition("r")[2]) % 2:
                entry.resume, entry.handle = self.streamer.retract(entry.handle), -1
