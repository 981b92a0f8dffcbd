"""The least that a step could cost, and the ways to issue its launch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from device_empty import empty_kernel
from device_place import Place
from gpupack.kernels.pack import pack_kernel

from gpupack.core import layout as L
from gpupack.packer.cuda_graph import PackGraph
from gpupack.packer.packer import Packer

Sample = dict[str, float]  # clock: nanoseconds
Variants = dict[str, Callable[[], Sample]]


class Calls:
    """Three ways to issue the launch: Triton's JIT call, its compiled kernel with arguments bound, a graph replay."""

    def __init__(self, place: Place, packer: Packer, batch: int) -> None:
        self.place, self.packer, self.batch = place, packer, batch

    def variants(self, handles: Any, inputs: dict[str, Any]) -> Variants:
        """Only what there is here: the interpreter has the first."""
        backend: Any = self.packer.backend
        calls: dict[str, Callable[[], Any]] = {"JIT call": lambda: backend.enqueue(self.batch)}
        if self.place.cuda:
            calls["pre-bound call"] = bound_launch(backend, self.batch)
            calls["graph replay"] = PackGraph(self.packer, self.batch)._graph.replay
        return {name: lambda call=call: self._timed(call, handles, inputs) for name, call in calls.items()}

    def _timed(self, call: Callable[[], Any], handles: Any, inputs: dict[str, Any]) -> Sample:
        """Host time of one call, of as many as the ring has buffers."""
        backend: Any = self.packer.backend
        for _ in range(self.packer.config.buffers):
            self.packer.step(handles, **inputs).wait().release()
        for_any_launch(backend)
        began = time.perf_counter_ns()
        for _ in range(self.packer.config.buffers):
            call()
        ns = (time.perf_counter_ns() - began) / self.packer.config.buffers
        self.place.synchronize()
        count_launches(backend, self.packer.config.buffers)
        return {"launch": ns}


class Floor:
    """An empty kernel, and a copy of as many bytes as the packed step has: the least that a step could cost."""

    def __init__(self, place: Place, step_bytes: int, programs: int) -> None:
        self.runtime, self.programs = place.runtime, programs
        self.source = place.runtime.zeros(step_bytes // L.WORD, torch.int32)
        self.target = place.runtime.host(step_bytes // L.WORD, torch.int32)

    def launch(self) -> None:
        """Enqueue the empty kernel."""
        self.runtime.launch(empty_kernel, self.programs, [self.source] * 4, {}, 4)

    def launch_and_copy(self) -> None:
        """Enqueue both."""
        self.launch()
        self.runtime.copy(self.target, self.source)

    def visible(self) -> Sample:
        """Both, until the bytes are there."""
        began = time.perf_counter_ns()
        self.launch_and_copy()
        event = self.runtime.record()
        launched = time.perf_counter_ns()
        event.synchronize()
        return {"launch": launched - began, "visible": time.perf_counter_ns() - began}


def bound_launch(backend: Any, batch: int) -> Callable[[], Any]:
    """The launch of `backend.enqueue(batch)` by Triton's compiled kernel, its arguments bound once."""
    constants, arguments, shape = backend._constants, backend._arguments, backend.shape
    compiled = pack_kernel.warmup(*arguments, **constants, num_warps=shape.warps, grid=(1,))
    values = [*arguments, *(constants[name] for name in pack_kernel.arg_names[len(arguments) :])]
    runner = compiled[(max(-(-batch // shape.block), 1), 1, 1)]
    return lambda: runner(*values)


def for_any_launch(backend: Any) -> None:
    """Let launches that nobody prepares do what the control blocks of the ring say."""
    for buffer in backend.ring.buffers:
        buffer.control[L.LAUNCH_NUMBER] = -1


def count_launches(backend: Any, launches: int) -> None:
    """Count launches that the backend was not asked for: a multiple of its buffers, so the ring stands as it did."""
    assert launches % backend.config.buffers == 0
    backend._launch += launches
