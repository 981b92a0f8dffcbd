"""DeviceBackend: what the engine samples, packed in stream order, and on the host by the time its result is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket
from gpupack.sglang.batch import Batch
from gpupack.sglang.columns import PackedItems
from gpupack.sglang.device.backlog import Backlog
from gpupack.sglang.device.config import IN_FLIGHT, config_of, why_not_here
from gpupack.sglang.device.pool_handles import PoolHandles, UnsupportedByDevice
from gpupack.sglang.device.tensors import step_inputs
from gpupack.sglang.request_states import RequestStates
from gpupack.sglang.stats import Stats

logger = logging.getLogger(__name__)

ELSEWHERE = "tokens that went another way"
OUTSIDE = "outside of a step"
FAILED = "the device backend failed"

T = TypeVar("T")


@dataclass
class DeviceStep:
    """A step of the engine, kept on its result: the ticket of its launch, once committed; or why there is none."""

    backend: DeviceBackend
    ticket: Ticket | None = None
    why: str | None = None


class DeviceBackend:
    """The device side of a streamer; the engine's scheduler calls it through `device_hooks.py`, on one thread.

    All requests are conveyed: the engine's own lists say how long an output is and whether it has ended, the
    request_states's cursors who sends from where to where, and the packed steps bring the items. Nothing depends on
    it: what it has not, or not any more, the engine's lists have, and if it fails the host backend goes on.
    """

    def __init__(self, scheduler: Any, sender: Any, request_states: RequestStates, stats: Stats) -> None:
        self._request_states, self._stats = request_states, stats
        self._backlog = Backlog(request_states)
        self._packer: Packer | None = None
        self._handles: PoolHandles | None = None
        self._why: str | None = None  # nothing is packed in this engine
        self._prepared: DeviceStep | None = None
        self._current: tuple[Any, DeviceStep] | None = None
        self._guarded(lambda: self._begin_with(scheduler, sender), None)

    # --- as the engine launches a batch -----------------------------------------------------------

    def relayed(self, batch: Any, result: Any) -> None:
        """A batch was sampled: enqueue its launch on the current stream, which is the forward stream."""
        step = result.gpupack = DeviceStep(self)
        self._guarded(lambda: self._launch(batch, result, step), step)

    def copied(self, step: DeviceStep) -> None:
        """Its result is about to be copied to the host: what is packed goes along, on the current stream."""
        if step is self._prepared:
            self._guarded(self._commit, step)

    def _launch(self, batch: Any, result: Any, step: DeviceStep) -> None:
        assert self._packer is not None
        assert self._handles is not None
        if self._prepared is not None:
            self._commit()  # its result was not copied
        while len(self._packer.in_flight) >= IN_FLIGHT:
            self._packer.in_flight[0].wait().release()  # its result was dropped
        reqs, indices = batch.reqs, batch.req_pool_indices_cpu.numpy()
        if len(indices) != len(reqs) or not reqs:
            raise UnsupportedByDevice("rows that are no requests")
        owners = self._handles.of(reqs, indices)
        inputs = step_inputs(result, len(reqs), *self._handles.asked(indices))
        self._packer.prepare_launch(owners, **inputs)
        self._packer.enqueue(len(reqs))
        self._prepared = step

    def _commit(self) -> None:
        assert self._packer is not None
        assert self._prepared is not None
        step, self._prepared = self._prepared, None
        step.ticket = self._packer.commit_launch()

    def _begin_with(self, scheduler: Any, sender: Any) -> None:
        """Make the packer, which compiles, before the engine serves."""
        self._why = why_not_here(scheduler, sender)
        if self._why is None:
            generations = scheduler.req_to_token_pool.req_generation.numpy()
            self._packer = Packer(config_of(scheduler, len(generations)))
            self._handles = PoolHandles(self._packer, generations)
            if self._packer.config.device == "cuda":
                torch.cuda.synchronize()  # its memory was cleared on this stream, and is used on others

    # --- as the engine processes its result -------------------------------------------------------

    def begin(self, batch: Any, result: Any) -> None:
        """The engine is about to commit the result of a batch, and to call the streamer with its requests."""
        step = getattr(result, "gpupack", None)
        if step is not None and batch.reqs:
            self._backlog.meet(self._request_states.membership_of(batch.reqs))
            self._current = batch.reqs, step

    def end(self) -> None:
        """The engine has committed it."""
        if self._current is not None:  # the streamer was not called
            step, self._current = self._current[1], None
            nobody = np.empty(0, np.int32)
            self._guarded(lambda: self._take(nobody, nobody, step), step)

    def items(self, batch: Batch, rows: NDArray[np.int32]) -> PackedItems | None:
        """The items of rows of `emit_rule.advance`; None: the engine's lists have them. Counts batches by reason."""
        self._backlog.meet(batch.membership)
        step, sends = self._step_of(batch.reqs), rows.shape[1] > 0
        items = self._guarded(lambda: self._items(batch, rows, step), step)
        why = OUTSIDE if step is None else step.why
        if items is not None or (step is not None and why is None and not sends):
            self._stats.packed += 1
        elif (step is not None or sends) and self._stats.count_unpacked(why or ELSEWHERE):
            logger.info("gpupack: batches are made of the engine's lists: %s", why or ELSEWHERE)
        return items

    def passed(self, reqs: Any, slots: NDArray[np.int32]) -> None:
        """The engine's own streamer takes these requests."""
        self._backlog.meet(self._request_states.membership_of(reqs))
        step = self._step_of(reqs)
        lens = np.array([len(req.output_ids) for req in reqs], np.int32)
        self._guarded(lambda: self._take(slots, lens, step), step)

    def _items(self, batch: Batch, rows: NDArray[np.int32], step: DeviceStep | None) -> PackedItems | None:
        self._take(batch.slots, batch.lens, step)
        if not rows.shape[1] or (step is not None and step.why is not None):
            return None
        return self._backlog.items(batch, rows)

    def _take(self, slots: NDArray[np.int32], lens: NDArray[np.int32], step: DeviceStep | None) -> None:
        """Keep what the ticket of a step brings; without one, see what of these requests is not kept any more."""
        ticket = None if step is None else step.ticket
        if step is None or ticket is None:
            self._backlog.take(slots, lens, None)
            return
        assert self._packer is not None
        step.ticket = None
        if ticket not in self._packer.in_flight:
            self._backlog.take(slots, lens, None)
            raise UnsupportedByDevice(ELSEWHERE)
        while self._packer.in_flight[0] is not ticket:
            self._packer.in_flight[0].wait().release()  # its result was dropped
        packed = ticket.wait()
        try:
            self._backlog.take(slots, lens, packed)
        finally:
            packed.release()

    def _step_of(self, reqs: Any) -> DeviceStep | None:
        """The step whose requests the streamer is called with; None outside of one."""
        if self._current is None or self._current[0] is not reqs:
            return None
        step, self._current = self._current[1], None
        return step

    def _guarded(self, work: Callable[[], T], step: DeviceStep | None) -> T | None:
        """Do it; None if it cannot be done, for this batch or for good: the engine's lists are there."""
        why = self._why
        if why is None:
            try:
                return work()
            except UnsupportedByDevice as reason:
                why = str(reason)
            except Exception:
                self._why = why = FAILED
                logger.exception("gpupack: the device backend failed; the host backend goes on")
        if step is not None:
            step.why, step.ticket = why, None
        return None
