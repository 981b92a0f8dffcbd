"""HostStreamer: the generation path of the engine's streamer, by gpupack's rule on the host."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core.errors import ConfigError
from gpupack.sglang import emit_rule as C
from gpupack.sglang.batch import Batch
from gpupack.sglang.columns import PackedItems
from gpupack.sglang.counting_socket import CountingSocket
from gpupack.sglang.frames import FrameMaker
from gpupack.sglang.output_rows import OutputRows
from gpupack.sglang.request_states import RequestStates
from gpupack.sglang.senders import FrameSender, MessageSender, StepSender, message_maker, why_no_frames
from gpupack.sglang.settings import Settings
from gpupack.sglang.stats import Stats
from gpupack.sglang.unsupported import why_engine_unsupported
from gpupack.sglang.verify import Verifier
from gpupack.sglang.versions import STREAMERS, EngineVersion

if TYPE_CHECKING:
    from gpupack.sglang.device.backend import DeviceBackend

logger = logging.getLogger(__name__)


class HostStreamer:
    """What `streamer_class` puts in place of `_stream_output_generation`.

    Lengths, finishes and retractions are read from the engine's requests, who sends and from where to where
    is found by the compiled rule, and one message is made of columns. A batch with a request that is not
    covered goes through the engine's own streamer: the requests' cursor fields are brought up to date before and
    read after it.
    """

    def __init__(
        self, streamer: Any, engine: EngineVersion, settings: Settings, *, custom: bool, scheduler: Any = None
    ) -> None:
        self._streamer, self._engine = streamer, engine
        self._policy = engine.policy.bits
        self._force_interval = int(import_module(STREAMERS).DEFAULT_FORCE_STREAM_INTERVAL)
        self._why_engine = "custom streamer" if custom else None
        self._why_engine = self._why_engine or why_engine_unsupported(
            streamer, engine.pp_size(streamer), settings.backend
        )
        self.request_states = RequestStates()
        self._verifier = Verifier(streamer) if settings.verify else None
        self._socket = CountingSocket.under(streamer)
        self._actions = np.empty(0, np.uint8)
        self.wire = "compatible"
        self.stats = Stats("scheduler", settings.stats)
        self._sender: StepSender | None = None
        self.device: DeviceBackend | None = None
        if self._why_engine is None:
            try:
                self._sender = self._make_sender(settings)
            except ConfigError as error:
                self._why_engine = "unknown message"
                logger.warning("gpupack: %s", error)
        if settings.backend == "device" and self._why_engine is None:
            from gpupack.sglang.device.backend import DeviceBackend  # compiles loops that others do not need

            self.device = DeviceBackend(scheduler, streamer.send_to_detokenizer, self.request_states, self.stats)
        self.stats.labels.update(version=engine.version, wire=self.wire, backend=settings.backend)
        self.stats.start(metrics=bool(getattr(streamer.server_args, "enable_metrics", False)))
        logger.info(
            "gpupack is active: version %s, sglang %s, backend %s, wire %s%s",
            metadata.version("gpupack"), engine.version, _backend_of(streamer, settings), self.wire,
            ", verifying" if settings.verify else "",
        )  # fmt: skip

    def _make_sender(self, settings: Settings) -> StepSender:
        maker = message_maker(self._streamer, self._engine, self.request_states)
        if settings.wire == "compatible":
            return MessageSender(self._streamer, maker, self.stats)
        why = why_no_frames(self._streamer, self._engine.plugins_in_detokenizer)
        if why is not None:
            logger.warning("gpupack: the wire is compatible, not native: %s", why)
            return MessageSender(self._streamer, maker, self.stats)
        self.wire = "native"
        frames = FrameMaker(self._streamer, self._engine, self.request_states)
        return FrameSender(self._streamer, maker, frames, self.stats, settings)

    def stream(self, reqs: Sequence[Any], return_logprob: bool, skip_req: Any, is_idle_batch: bool) -> None:
        """One call of the engine, after a step or outside of one."""
        why = self._why_engine or self.request_states.membership_of(reqs).why
        if why is not None or self._sender is None:
            self.count_fallback(str(why))
            begun = time.thread_time_ns()
            self._by_engine(reqs, return_logprob, skip_req, is_idle_batch)
            self.stats.engine_ns += time.thread_time_ns() - begun
            return
        expected = None
        if self._verifier is not None:
            expected = self._verifier.message(reqs, return_logprob, skip_req, is_idle_batch)
        begun = time.thread_time_ns()
        batch = Batch(reqs, return_logprob, skip_req, self.request_states)
        rows = self._decide(batch)
        batch.mark_final()
        packed_items = None if self.device is None else self.device.items(batch, rows)
        made = None
        if rows.shape[1] or is_idle_batch:
            made = self._make(batch, rows, packed_items)
        packed = time.thread_time_ns()
        if self._verifier is not None:
            self.stats.verified += 1
            self.stats.differences += self._verifier.compare(expected, self._sender.shown(made), sent=made)
        before, sending = self._sent_bytes, time.thread_time_ns()
        if made is not None:
            self._sender.send(made)
        sent = time.thread_time_ns()
        tokens = int(batch.facts[C.TOKENS])
        self.stats.count_step(rows.shape[1], tokens, self._sent_bytes - before, packed - begun, sent - sending)

    @property
    def _sent_bytes(self) -> int:
        return 0 if self._socket is None else self._socket.sent_bytes

    def count_fallback(self, why: str) -> None:
        """Count a batch that the engine's own streamer takes, and log the first for each reason."""
        if self.stats.count_fallback(why):
            logger.warning("gpupack: batches go through the engine's own streamer: %s", why)

    def _by_engine(self, reqs: Sequence[Any], return_logprob: bool, skip_req: Any, is_idle_batch: bool) -> None:
        if self._sender is None:
            self._streamer.engine_stream(reqs, return_logprob, skip_req, is_idle_batch)
            return
        slots = self.request_states.slots_of(reqs)
        if self.device is not None:
            self.device.passed(reqs, slots)
        self._sender.leave(slots)
        if self._verifier is not None:  # which has moved the requests' own cursors all the time
            self.stats.differences += self.request_states.disagreeing(reqs, slots)
        self.request_states.flush(reqs, slots)
        self._streamer.engine_stream(reqs, return_logprob, skip_req, is_idle_batch)
        self.request_states.reload(reqs, slots)

    def _decide(self, batch: Batch) -> NDArray[np.int32]:
        """The rows that send, int32 `[ROW_WIDTH, rows]`; their cursors have moved."""
        count, cursors = len(batch.reqs), self.request_states.cursors
        if count > len(self._actions):
            self._actions = np.empty(2 * count, np.uint8)
        actions = self._actions[:count]
        rows = np.zeros((C.ROW_WIDTH, count), np.int32)
        asks = C.find_due(
            cursors, batch.slots, batch.lens, batch.ends, batch.skipped, self._engine.stream_interval(self._streamer),
            self._force_interval, self._policy, actions,
        )  # fmt: skip
        if asks:
            for i in np.flatnonzero(actions == C.ASKS).tolist():
                held = batch.reqs[i].check_match_stop_str_prefix()
                actions[i] = C.NOTHING if held else C.SENDS
                self.stats.held += bool(held)
        sent = C.advance(
            cursors, batch.slots, batch.lens, batch.ends, actions, batch.retracted, batch.return_logprob,
            self._policy, rows, batch.facts,
        )  # fmt: skip
        return rows[:, :sent]

    def _make(self, batch: Batch, rows: NDArray[np.int32], packed: PackedItems | None) -> Any:
        assert self._sender is not None
        final: list[int] = []
        if batch.final:
            final = np.searchsorted(rows[C.BATCH_INDEX], batch.final).tolist()
            for i in batch.final:
                self._streamer._maybe_log_time_stats(req=batch.reqs[i])
        return self._sender.make(OutputRows.of(batch, rows, final, packed))


def _backend_of(streamer: Any, settings: Settings) -> str:
    """The backend as the log names it: a device's packer may run on the CPU, where an engine does."""
    if settings.backend != "device" or str(getattr(streamer.server_args, "device", "")).startswith("cuda"):
        return settings.backend
    return "device (cpu packer)"


def streamer_class(
    base: type, engine: EngineVersion, settings: Settings, *, custom: bool = False, scheduler: Any = None
) -> type:
    """The class that takes the place of the engine's streamer `base`; `custom`: that is not the engine's own.

    `scheduler` is the engine's, whose streamer it will be; the device backend needs it.
    """

    class GpupackOutputStreamer(base):  # type: ignore[misc]
        """The engine's streamer, its generation path by gpupack."""

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.gpupack = HostStreamer(self, engine, settings, custom=custom, scheduler=scheduler)

        def _stream_output_generation(
            self, reqs: list[Any], return_logprob: bool, skip_req: Any = None, is_idle_batch: bool = False
        ) -> None:
            self.gpupack.stream(reqs, return_logprob, skip_req, is_idle_batch)

        def _stream_output_embedding(self, reqs: list[Any]) -> None:
            self.gpupack.count_fallback("embedding model")
            super()._stream_output_embedding(reqs)

        def engine_stream(
            self, reqs: Sequence[Any], return_logprob: bool, skip_req: Any = None, is_idle_batch: bool = False
        ) -> None:
            """The engine's own way."""
            super()._stream_output_generation(reqs, return_logprob, skip_req, is_idle_batch)

    return GpupackOutputStreamer
