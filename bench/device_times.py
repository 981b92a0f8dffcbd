"""What a step costs on the device and on the host's clock, beside what it replaces and the least there can be.

Variants of a workload take turns, so what disturbs one disturbs all. Two clocks:

- device: of one launch, queued behind a long kernel with others like it, so that no host time is in it;
- host: from the call until it returns ("launch"), and until the step is whole on the host ("visible"), which
  finds the device idle. Waiting spins, unless said otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from device_floor import Calls, Floor, Sample, Variants, count_launches, for_any_launch
from device_place import Place
from rows import quantiles

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.request import Request
from gpupack.packer.cuda_graph import PackGraph
from gpupack.packer.packer import Packer

Row = dict[str, Any]
COPIES_AT_MOST = 20  # rounds in which the copies for each request take part: they are slow
WARMUP = 3  # rounds on a device


class Sizes(NamedTuple):
    """What is timed, and how often."""

    batches: tuple[int, ...]
    accepts: tuple[int, ...]
    tops: tuple[int, ...]
    rounds: int
    chain: int  # launches in one sample of the device's clock; a multiple of the ring's buffers


def run(place: Place, sizes: Sizes, left: Callable[[], float]) -> Iterator[Row]:
    """A row for each workload, variant and clock."""
    shapes = [(accept, top) for accept in sizes.accepts for top in sizes.tops]
    for number, (accept, top) in enumerate(shapes):
        share = left() / (len(shapes) - number)
        until = left() - share
        if left() < 5:
            detail = f"time ran out before max_accept {accept}, top-k {top}"
            yield {"check": "all workloads timed", "passed": False, "detail": detail}
            return
        yield from Workload(place, accept, top, sizes).rows(left, until)
    yield {"check": "all workloads timed", "passed": True, "detail": ""}


class Workload:
    """Packers of one kind, and the inputs of the largest batch; every request sends in each step."""

    def __init__(self, place: Place, accept: int, top: int, sizes: Sizes) -> None:
        self.place, self.accept, self.top, self.sizes = place, accept, top, sizes
        self.most = max(sizes.batches)
        self.packers = {name: self._packer(place.name, transfer=name) for name in ("mapped", "copy")}
        self.packers["blocking wait"] = self._packer(place.name, wait="block")
        self.on_host = self._packer("cpu") if place.numba else None
        self.handles = np.random.default_rng(1).permutation(self._admit(self.packers["mapped"]))
        for packer in (self.packers["copy"], self.packers["blocking wait"], self.on_host):
            if packer is not None:
                self._admit(packer)
        arrays = self._arrays()
        self.inputs = {name: place.tensor(array) for name, array in arrays.items()}
        self.landing = {name: place.runtime.host(array.nbytes // 4, torch.int32) for name, array in arrays.items()}
        self.arrays = arrays

    def _packer(self, device: Any, **options: Any) -> Packer:
        config = PackerConfig(
            128_000, (2,), capacity=self.most, window=64, family_window=8, max_accept=self.accept,
            max_top_logprobs=self.top, device=device, **{"wait": "spin", **options},
        )  # fmt: skip
        return Packer(config)

    def _admit(self, packer: Packer) -> Any:
        about: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": self.top, "ignore_eos": True}
        return packer.admit([Request(f"r{i}", **about) for i in range(self.most)])

    def _arrays(self) -> dict[str, Any]:
        rng, rows, runs = np.random.default_rng(2), self.most, self.accept
        arrays: dict[str, Any] = {
            "token_ids": rng.integers(3, 128_000, (rows, runs)),
            "logprobs": rng.random((rows, runs), np.float32),
        }
        if runs > 1:
            arrays["accept_lens"] = np.full(rows, runs, np.int32)
        if self.top:
            arrays["top_logprobs_val"] = rng.random((rows, runs, self.top), np.float32)
            arrays["top_logprobs_idx"] = rng.integers(0, 128_000, (rows, runs, self.top), np.int32)
        return arrays

    def rows(self, left: Callable[[], float], until: float) -> Iterator[Row]:
        """All batch sizes, each for its share of the time."""
        for number, batch in enumerate(self.sizes.batches):
            end = left() - (left() - until) / (len(self.sizes.batches) - number)
            variants, step_bytes = self.variants(batch)
            samples: dict[tuple[str, str], list[float]] = {}
            warmup = WARMUP if self.place.cuda else 0
            for turn in range(warmup + self.sizes.rounds):
                if turn > warmup and left() < end:
                    break
                for name, variant in variants.items():
                    if name == "copies for each request" and turn > COPIES_AT_MOST:
                        continue
                    for clock, ns in variant().items():
                        if turn >= warmup:
                            samples.setdefault((name, clock), []).append(ns)
            about = {"batch": batch, "max_accept": self.accept, "top_k": self.top, "bytes": step_bytes}
            for (name, clock), values in samples.items():
                yield {**about, "what": name, "clock": clock, **quantiles(values)}

    # --- what is timed ----------------------------------------------------------------------------

    def variants(self, batch: int) -> tuple[Variants, int]:
        """Everything that is timed at a batch size, and the bytes of its packed step."""
        place, handles = self.place, self.handles[:batch]
        inputs = {name: array[:batch] for name, array in self.inputs.items()}
        at_home = place.tensor(handles) if place.cuda else handles
        step_bytes, programs = self._used_bytes(handles, inputs)
        floor = Floor(place, step_bytes, programs)
        variants: Variants = {
            "empty kernel": lambda: {"device": place.chain_ns(self._repeat(floor.launch), self.sizes.chain)},
            "empty kernel, memcpy": lambda: (
                floor.visible() | {"device": place.chain_ns(self._repeat(floor.launch_and_copy), self.sizes.chain)}
            ),
            "kernel, handles on the host": lambda: self._chain("mapped", batch, handles, inputs),
            "kernel": lambda: self._chain("mapped", batch, at_home, inputs),
            "kernel, to device memory": lambda: self._chain("copy", batch, at_home, inputs),
        }
        for name, packer in self.packers.items():
            variants[f"step, {name}"] = lambda step=packer.step: visible(lambda: step(handles, **inputs))
        mapped = self.packers["mapped"]
        launched = PackGraph(mapped, batch).step if place.cuda else partial(_around, mapped, batch)
        variants["step by graph"] = lambda: visible(lambda: launched(at_home, **inputs))
        if batch == 256 or not place.cuda:
            variants |= Calls(place, mapped, batch).variants(at_home, inputs)
        if self.on_host is not None:
            variants["ids copied, packed on the host"] = lambda: self._on_host(batch, handles, inputs)
        if self.top:
            variants["copies for each request"] = lambda: copies_for_each(inputs)
        return variants, step_bytes

    def _used_bytes(self, handles: Any, inputs: dict[str, Any]) -> tuple[int, int]:
        """Bytes of a packed step that are used, and programs of its launch."""
        packer = self.packers["mapped"]
        packed = packer.step(handles, **inputs).wait()
        items = len(packed.token_ids) + len(packed.logprobs) + len(packed.families)
        words = packed.geometry.tokens + items
        packed.release()
        block = packer.backend.shape.block  # type: ignore[attr-defined]
        return words * L.WORD, -(-len(handles) // block)

    def _repeat(self, call: Callable[[], None]) -> Callable[[], None]:
        return lambda: [call() for _ in range(self.sizes.chain)] and None  # type: ignore[return-value]

    def _chain(self, name: str, batch: int, handles: Any, inputs: dict[str, Any]) -> Sample:
        """Launches that read the control blocks of the steps before; then the host counts them, too."""
        packer = self.packers[name]
        for _ in range(packer.config.buffers):
            packer.step(handles, **inputs).wait().release()
        backend: Any = packer.backend
        for_any_launch(backend)
        ns = self.place.chain_ns(self._repeat(lambda: backend.enqueue(batch)), self.sizes.chain)
        count_launches(backend, self.sizes.chain)
        return {"device": ns}

    def _on_host(self, batch: int, handles: Any, inputs: dict[str, Any]) -> Sample:
        """What an engine can do instead: copy what was sampled, wait, pack with the CPU backend."""
        assert self.on_host is not None
        runtime, began = self.place.runtime, time.perf_counter_ns()
        copied = {}
        for name, tensor in inputs.items():
            words = self.landing[name][: tensor.nbytes // 4]
            runtime.copy(words, tensor.view(-1).view(words.dtype))
            array = self.arrays[name]
            copied[name] = words.numpy().view(array.dtype).reshape(batch, *array.shape[1:])
        runtime.record().synchronize()
        packed = self.on_host.step(handles, **copied).wait()
        packed.header(L.H_ROWS)
        seen = time.perf_counter_ns()
        packed.release()
        return {"visible": seen - began}


def visible(step: Callable[[], Any]) -> Sample:
    """One step, until its header has been read on the host."""
    began = time.perf_counter_ns()
    ticket = step()
    launched = time.perf_counter_ns()
    packed = ticket.wait()
    packed.header(L.H_ROWS)
    seen = time.perf_counter_ns()
    packed.release()
    return {"launch": launched - began, "visible": seen - began}


def copies_for_each(inputs: dict[str, Any]) -> Sample:
    """Two small copies a request, values and ids of its top logprobs: what engines issue today."""
    values, ids = inputs["top_logprobs_val"], inputs["top_logprobs_idx"]
    began = time.perf_counter_ns()
    for i in range(len(values)):
        values[i].tolist()
        ids[i].tolist()
    return {"visible": time.perf_counter_ns() - began}


def _around(packer: Packer, batch: int, *arrays: Any, **given: Any) -> Any:
    """What a graph's step does, without the graph."""
    packer.prepare_launch(*arrays, **given)
    packer.enqueue(batch)
    return packer.commit_launch()
