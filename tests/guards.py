"""The guards of the device protocol, and for each an edit that takes it out."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any, NamedTuple

from simulated import SimulatedRuntime

from gpupack.backends.cuda.backend import TritonBackend
from gpupack.backends.cuda.buffer_ring import LaunchRing
from gpupack.backends.cuda.inflight import DeviceStep
from gpupack.backends.cuda.launch_args import LaunchWriter
from gpupack.core.packed_output import PackedStep
from gpupack.packer import retract as retraction
from gpupack.packer.cuda_graph import PackGraph
from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket


class Guard(NamedTuple):
    """Where a guard is: a method or function, a piece of its source, and what stands there without the guard."""

    owner: Any
    name: str
    old: str
    new: str

    def taken_out(self) -> Any:
        """The function without its guard."""
        function = vars(self.owner)[self.name]
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, "the guard is in the source"
        names = dict(vars(inspect.getmodule(function)))
        exec("from __future__ import annotations\n" + source.replace(self.old, self.new), names)
        return names[self.name]


KEPT = "self.__dict__.setdefault"
READ = "copy: NDArray[np.int32] = self.runtime.read(self.arena[start : start + words]).numpy()"
FETCH = """target = self.runtime.host(words, torch.int32)
    self.runtime.fetch(target, self.arena[start : start + words])
    copy = target.numpy()"""
LAUNCH = """        with self.runtime.span("launch"):
            self.enqueue(self._batch)
        return self.commit()"""
COMMIT_FIRST = """        step = self.commit()
        self.enqueue(self._batch)
        return step"""
COPIED = """    copied = self._copy_expected(step) if self.ring.copies else {}
    step.committed(self.runtime.record(), copied)"""
EVENT_FIRST = """    event = self.runtime.record()
    step.committed(event, self._copy_expected(step) if self.ring.copies else {})"""
WRONG_STEP = "launch != self.number or error"

GUARDS = {
    # The result, and what must have been done before it is read.
    "waits for the event": Guard(DeviceStep, "result", "self._wait(self._event.synchronize)", "pass"),
    "ready means ready": Guard(DeviceStep, "ready", "return self._event.query()", "return True"),
    "event and copies behind the launch": Guard(TritonBackend, "step", LAUNCH, COMMIT_FIRST),
    "event behind the copies": Guard(TritonBackend, "commit", COPIED, EVENT_FIRST),
    "the rest is fetched": Guard(DeviceStep, "result", "self._fetch_rest(words)", "pass"),
    "launch number of the header": Guard(DeviceStep, "result", WRONG_STEP, "error"),
    "error word of the header": Guard(DeviceStep, "result", WRONG_STEP, "launch != self.number"),
    "a failed step closes the packer": Guard(Packer, "take_in", "        self.close()\n", ""),
    "a failed launch closes the packer": Guard(Packer, "guarded", "        self.close()\n", ""),
    "a failed device fails the step": Guard(DeviceStep, "_wait", "except RuntimeError", "except ZeroDivisionError"),
    "closing waits for what was enqueued": Guard(Packer, "close", "        self.backend.close()\n", ""),
    # Buffers.
    "a busy buffer is not taken": Guard(
        LaunchRing, "take", "not self._given_back.wait_for(lambda: not buffer.busy, self._timeout_s)", "False"
    ),
    "a launch makes its buffer busy": Guard(LaunchRing, "advance", "busy = True", "busy = False"),
    "buffers go in turn": Guard(LaunchRing, "advance", "(self.next + 1) % len(self.buffers)", "self.next"),
    "a release gives the buffer back": Guard(LaunchRing, "give_back", "buffer.busy = False", "pass"),
    "a released step shows nothing": Guard(PackedStep, "release", "self._buffer = self._header", "self._header"),
    # Memory of the host that the device reads late.
    "indices of a write stay": Guard(
        TritonBackend, "_write", "self.runtime.host(len(index), torch.int64)",
        f"{KEPT}('places', self.runtime.host(4096, torch.int64))[: len(index)]",
    ),
    "values of a write stay": Guard(
        TritonBackend, "_write", "self.runtime.host(len(values), torch.int32)",
        f"{KEPT}('values', self.runtime.host(4096, torch.int32))[: len(values)]",
    ),
    "handles of a launch stay": Guard(LaunchWriter, "_taken", "buffer.handles)", f"{KEPT}('kept', buffer.handles))"),
    "lens of a launch stay": Guard(
        LaunchWriter, "_taken", "buffer.lens.get(name)", f"{KEPT}(name, buffer.lens.get(name))"
    ),
    "arrays of the caller are copied": Guard(
        LaunchWriter, "_input", "self.runtime.upload(torch.from_numpy(array))",
        "self.runtime.memory.add(torch.from_numpy(array), device=False)",
    ),
    "control of the caller is copied": Guard(Ticket, "__init__", "control.words.copy()", "control.words"),
    # Order.
    "a graph takes batches of its size": Guard(PackGraph, "step", "len(handles) > self.batch_capacity", "False"),
    "commit before the next prepare": Guard(TritonBackend, "prepare", "if self._prepared is not None", "if False"),
    "steps are taken in by their order": Guard(
        Packer, "take_in", "if not self._in_flight or self._in_flight[0] is not ticket", "if False"
    ),
    "no more steps in flight than agreed": Guard(
        Packer, "_mode", "len(self._in_flight) >= self._max_in_flight", "False"
    ),
    "admissions in stream order": Guard(
        TritonBackend, "install", 'self.runtime.span("admit")', "self.runtime.elsewhere()"
    ),
    "endings in stream order": Guard(
        TritonBackend, "end", "    self._write(", "    with self.runtime.elsewhere():\n        self._write("
    ),
    "state is read behind all launches": Guard(TritonBackend, "_read", READ, FETCH),
    "the packer's stream waits for the current one": Guard(
        SimulatedRuntime, "enqueue", "[Mark(self, self.engine)]", "[]"
    ),
    # Handles that ended.
    "rows of ended handles are dropped": Guard(
        Packer, "take_in", "ticket.endings != self.endings and packed.rows", "False"
    ),
    "endings count from prepare_launch": Guard(
        Packer, "commit_launch", "    return self._launched(ticket,",
        "    ticket.endings = self.endings\n    return self._launched(ticket,",
    ),
    "a retraction looks at rows in flight": Guard(
        retraction, "_rows_in_flight", "return [(packed", "return [] and [(packed"
    ),
    "no retraction before commit_launch": Guard(Packer, "retract", "if self._prepared is not None", "if False"),
}  # fmt: skip
