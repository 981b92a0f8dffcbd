"""The steady state: nothing synchronises but the wait, nothing is compiled, whatever comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from device_place import Place
from device_reference import MismatchError, expect

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.request import Request
from gpupack.packer.cuda_graph import PackGraph
from gpupack.packer.packer import Packer
from gpupack.streamer.embeddings import BITS, ITEM_BYTES, EmbeddingGather

Row = dict[str, Any]
ROWS = 300
WIDTHS = (1, 37, 1024, 1030)  # of embeddings: an odd one, a tile, more than one
BATCHES = (ROWS, 1, 16, 17, 128, 129, 256, 257)


def run(place: Place, steps: int, left: Callable[[], float]) -> Iterator[Row]:
    """Steps by call and by graph, admissions and endings among them; then rows of embeddings."""
    for transfer in ("mapped", "copy"):
        for wait in ("block", "spin"):
            for stream in ("current", "named") if place.cuda else ("current",):
                life = SteadyLife(place, transfer, wait, place.stream() if stream == "named" else None)
                yield from checked(f"steady, {transfer}, {wait}, {stream} stream", life, place, steps, left)
    for width in WIDTHS:
        for dtype in ITEM_BYTES:
            gathers = Gathers(place, width, dtype)
            yield from checked(f"gather, {width} of {dtype}", gathers, place, max(steps // 10, 2), left)


def checked(name: str, life: Any, place: Place, steps: int, left: Callable[[], float]) -> Iterator[Row]:
    """Two steps to load what torch loads at its first use, then as many as asked for, watched."""
    done, failed = 0, ""
    try:
        with Compilations() as first:
            for number in range(2):
                life.step(number)
        with place.no_synchronisation(), Compilations() as compiled:
            while done < steps and left() > 0:
                life.step(2 + done)
                done += 1
    except (MismatchError, RuntimeError) as error:  # torch says with a RuntimeError that a call synchronises
        failed = f"step {done}: {error}"
    in_loop = [*first.names, *compiled.names] if not failed else []
    if not failed and in_loop:
        failed = f"compiled after the construction: {in_loop[:4]}"
    elif not failed and done < min(steps, 20):
        failed = f"time ran out after {done} of {steps} steps"
    yield {"check": name, "steps": done, "compilations": len(in_loop), "passed": not failed, "detail": failed}


class Compilations:
    """What Triton compiles in the block, or takes from its disk cache; nothing under the interpreter."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Compilations:
        from triton import knobs

        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._note
        return self

    def __exit__(self, *error: object) -> None:
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._before

    def _note(self, **about: Any) -> None:
        self.names.append(str(about.get("repr", about.get("key", "a kernel"))).partition("[")[0])


class SteadyLife:
    """A packer in its stride: requests that send a token in each step, and a few that come and go."""

    def __init__(self, place: Place, transfer: Any, wait: Any, stream: Any) -> None:
        config = PackerConfig(
            128_000, capacity=ROWS + 8, window=8, max_top_logprobs=2, family_window=8, transfer=transfer, wait=wait,
            device=place.name,
        )  # fmt: skip
        self.place, self.packer = place, Packer(config, stream=stream)
        self.handles = self.packer.admit([_request(i) for i in range(ROWS)])
        rng = np.random.default_rng(5)
        ids = rng.integers(3, 128_000, ROWS + 4)
        self.ids = ids
        # Of both widths, at any alignment, with more top logprobs than asked for.
        self.tokens = [place.tensor(ids.astype(dtype)) for dtype in (np.int64, np.int32)]
        self.logprobs = place.tensor(rng.random(ROWS + 4, np.float32))
        self.tops = [
            (place.tensor(rng.random((ROWS, k), np.float32)), place.tensor(rng.integers(0, 99, (ROWS, k), dtype)))
            for k, dtype in ((2, np.int32), (2, np.int64), (5, np.int64))
        ]
        self.on_device = place.tensor(self.handles)
        self.graph = PackGraph(self.packer) if place.cuda else None
        self._in_flight: list[tuple[Any, Any, Any]] = []

    def step(self, number: int) -> None:
        """Launch a batch, then take in the one before; every few steps a request comes and another ends."""
        batch = BATCHES[number % len(BATCHES)]
        shift, which = number % 4, number % 2
        values, indices = self.tops[number % len(self.tops)]
        handles = self.handles[:batch] if number % 3 or not self.place.cuda else self.on_device[:batch]
        launch = self.graph.step if self.graph is not None and number % 5 == 4 else self.packer.step
        ticket = launch(
            handles,
            self.tokens[which][shift : shift + batch],
            logprobs=self.logprobs[shift : shift + batch],
            top_logprobs_val=values[:batch],
            top_logprobs_idx=indices[:batch],
        )
        passing = self.packer.admit([_request(f"passing {number}")]) if number % 7 == 0 else None
        self._in_flight.append((ticket, batch, shift))
        if len(self._in_flight) == 2:
            self._take_in()
        if passing is not None:
            self.packer.retire(passing)

    def _take_in(self) -> None:
        ticket, batch, shift = self._in_flight.pop(0)
        packed = ticket.wait()
        expect("rows, logprobs", (batch, batch), (packed.rows, packed.header(L.H_LOGPROBS)))
        expect("token_ids", self.ids[shift : shift + batch], packed.token_ids)
        packed.release()


class Gathers:
    """Rows of outputs of one width and dtype, at any address and row stride, against NumPy."""

    def __init__(self, place: Place, width: int, dtype: str) -> None:
        import torch

        rng, size = np.random.default_rng(width), ITEM_BYTES[dtype]
        self.gather = EmbeddingGather(width, dtype, max_batch=ROWS, device=place.name)  # type: ignore[arg-type]
        self.sources = []
        for gap, shift in ((0, 0), (1, 0), (2, 1), (8, 0)):
            raw = rng.integers(0, 256, (ROWS * (width + gap) + shift) * size, np.uint8)
            items = raw.view(BITS[size])[shift:].reshape(ROWS, width + gap)[:, :width]
            tensor = place.tensor(raw).view(getattr(torch, dtype))[shift:].view(ROWS, width + gap)[:, :width]
            self.sources.append((items, tensor))
        self.rng = rng

    def step(self, number: int) -> None:
        """Gather rows in any order, some of them twice."""
        items, tensor = self.sources[number % len(self.sources)]
        rows = self.rng.integers(0, ROWS, (ROWS, 0, 1, 127)[number // 4 % 4], np.int32)
        gathered = self.gather.gather(tensor, rows).wait()
        expect("rows", items[rows], gathered.bits)
        gathered.release()


def _request(name: Any) -> Request:
    return Request(f"r{name}", return_logprob=True, top_logprobs_num=2)
