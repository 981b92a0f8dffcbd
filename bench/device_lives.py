"""Random lives of requests on a device and on the reference at once: everything equal, to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from device_draws import Draws
from device_place import Place
from device_reference import POISON, CpuReference, MismatchError, OracleReference, Reference, expect
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.config import EmitPolicy, PackerConfig, Transfer
from gpupack.core.request import Request
from gpupack.packer.cuda_graph import PackGraph
from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket

Row = dict[str, Any]
COMMON: dict[str, Any] = {"vocab_size": 60, "eos_token_ids": (2, 7), "max_in_flight": 3}
SEEN = ("rows", "tokens", "stale", "early", "held", "finished", "conveyed", "readmitted", "by graph")
LONG_LIFE = 200  # steps in which everything comes


class Case(NamedTuple):
    """A configuration, how its steps reach the host, and whether the packer has a stream of its own."""

    name: str
    transfer: Transfer
    options: dict[str, Any]
    named_stream: bool = False


CASES = (
    Case("one token", "mapped", {"capacity": 700, "window": 4}),
    Case("runs of 3", "copy", {"capacity": 300, "window": 16, "max_accept": 3}),
    Case(
        "top-k, token ids, counters",
        "mapped",
        {
            "capacity": 200,
            "window": 16,
            "family_window": 8,
            "max_accept": 3,
            "max_top_logprobs": 3,
            "max_token_ids_logprobs": 2,
            "speculative": True,
        },
        named_stream=True,
    ),
    Case(
        "0.5.16, counters",
        "copy",
        {
            "capacity": 300,
            "window": 16,
            "max_accept": 4,
            "speculative": True,
            "policy": EmitPolicy.sglang_0_5_16(),
        },
    ),
    Case(
        "top-20, 0.5.23",
        "copy",
        {"capacity": 300, "window": 8, "max_top_logprobs": 20, "policy": EmitPolicy.sglang_0_5_23()},
    ),
)


def run(place: Place, steps: int, seeds: int, left: Callable[[], float]) -> Iterator[Row]:
    """`steps` steps of random lives, an equal part for each case and seed."""
    each = -(-steps // (len(CASES) * seeds))
    for case in CASES:
        met: Counter[str] = Counter()
        for seed in range(seeds):
            life = Life(place, case, seed)
            done, failed = 0, ""
            try:
                while done < each and left() > 0:
                    life.step(done)
                    done += 1
                life.finish()
            except MismatchError as error:
                failed = f"step {done}: {error}"
            met.update(life.seen)
            wanted = failed or ("" if done == each else f"time ran out after {done} of {each} steps")
            about = {"check": f"{case.name}, {case.transfer}, seed {seed}", "steps": done, "rows": life.seen["rows"]}
            yield {**about, "against": life.reference.name, "passed": not wanted, "detail": wanted}
        if each * seeds >= LONG_LIFE:
            missing = [name for name in SEEN if not met[name]]
            detail = f"never: {missing}" if missing else ""
            yield {"check": f"{case.name}: met everything", "passed": not missing, "detail": detail}


class Life:
    """One packer on the device and its reference, and what is done to both."""

    def __init__(self, place: Place, case: Case, seed: int) -> None:
        self.config = config = PackerConfig(**COMMON, **case.options, transfer=case.transfer, device=place.name)
        self.place = place
        self.packer = Packer(config, stream=place.stream() if case.named_stream else None)
        self.backend: Any = self.packer.backend
        self.reference: Reference = CpuReference(config) if place.numba else OracleReference(config)
        self.graph = PackGraph(self.packer) if place.cuda else None
        self.draws = Draws(config, seed)
        self.requests: dict[int, Request] = {}
        self.in_flight: list[tuple[Any, Ticket]] = []
        self.ended: list[int] = []
        # Never given; slots that are not there, near and far; nonsense.
        self.nonsense = [99 << 32, (1 << 32) + config.capacity, (1 << 32) + 2**31, (1 << 63) - 1, -2]
        self.seen: Counter[str] = Counter()
        block, most = self.backend.shape.block, config.batch_capacity
        sizes = {blocks * block + more for blocks in range(most // block + 1) for more in (-1, 0, 1)}
        self.sizes = sorted({0, 1, 2, 7, most - 1, most} | {size for size in sizes if 0 <= size <= most})

    # --- life of a handle -------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """Now and then some come and go; then a launch."""
        if number % 8 == 0:
            self.churn()
        self.launch()
        if self.draws.chance(0.2):
            self.compare_state()

    def finish(self) -> None:
        """Take in what is in flight."""
        while self.in_flight:
            self.take_in()
        self.compare_state()

    def compare_state(self) -> None:
        self.reference.compare_state(self.backend.runtime.read(self.backend.arena).numpy())

    def churn(self) -> None:
        """Some requests end, some of those come back, new ones come; some slots stay free."""
        while self.in_flight and self.draws.chance(0.8):
            self.take_in()
        live = np.array(list(self.requests), np.int64)
        finished, conveyed = self.reference.standing(live)
        leaves = self.draws.rng.random(len(live)) < np.where(finished, 0.6, 0.1)
        for_good = finished | conveyed | bool(self.in_flight) | (self.draws.rng.random(len(live)) < 0.3)
        self.retire(live[leaves & for_good])
        for handle in live[leaves & ~for_good].tolist():
            self.retract(handle)
        room = self.config.capacity - len(self.requests)
        self.admit([self.draws.request() for _ in range(int(self.draws.rng.integers(room // 3, room + 1)))], None)

    def retire(self, handles: NDArray[np.int64]) -> None:
        self.packer.retire(handles)
        self.reference.retire(handles)
        for handle in handles.tolist():
            del self.requests[handle]
            self.ended.append(handle)

    def retract(self, handle: int) -> None:
        """A request is retracted and comes back at once."""
        one, other = self.reference.retract(handle), self.packer.retract(handle)
        for name in ("output_len", "unsent_tokens", "unsent_families", "spec_counts"):
            expect(f"resume.{name}", getattr(one, name), getattr(other, name))
        expect("resume.unsent_logprobs", one.unsent_logprobs.view(np.int32), other.unsent_logprobs.view(np.int32))
        self.ended.append(handle)
        self.admit([self.requests.pop(handle)], [one])
        self.seen["readmitted"] += 1

    def admit(self, requests: list[Request], resumes: list[Any] | None) -> None:
        handles = self.packer.admit(requests, resumes).tolist()
        expect("handles", self.reference.admit(requests, resumes or [None] * len(requests)), handles)
        self.requests |= dict(zip(handles, requests, strict=True))

    # --- one launch -------------------------------------------------------------------------------

    def launch(self) -> None:
        """One step, append or pack on both; what is in flight stays so for a while."""
        if len(self.in_flight) == self.config.max_in_flight or (self.in_flight and self.draws.chance(0.4)):
            self.take_in()
        handles, kind = self.batch(), self.draws.pick("step", "step", "step", "step", "append", "pack")
        rows, ones = len(handles), self.draws.chance(0.3)
        lens = self.draws.rng.integers(0, self.config.max_accept + 1, rows, self.draws.pick(np.int32, np.int64))
        lens = lens * 0 + 1 if ones else lens
        given: dict[str, Any] = {} if kind == "append" else {"return_logprob": self.draws.chance(0.7)}
        if kind != "append" and self.draws.chance(0.5):
            lengths = lens * np.int64(kind == "step")
            live = np.isin(handles, np.array(list(self.requests), np.int64))
            lengths[live] += self.reference.output_lens(handles[live])
            given["control"] = self.draws.control(lengths)
        arrays: dict[str, Any] = {"handles": handles}
        if kind != "pack":
            arrays |= self.draws.inputs(rows) | ({} if ones else {"accept_lens": lens})
        expected = self.reference.launch(kind, **arrays, **given)
        if self.config.transfer == "mapped":
            self.backend.ring.take().out.fill(POISON)
        by_graph = kind != "append" and self.draws.chance(0.3)
        ticket = self.launched(kind, by_graph, {name: self.placed(name, arrays[name]) for name in arrays} | given)
        self.in_flight.append((expected, ticket))

    def launched(self, kind: str, by_graph: bool, given: dict[str, Any]) -> Ticket:
        """A launch of the device's packer; by a graph, or where there are none, by the calls around one."""
        if not by_graph:
            return getattr(self.packer, kind)(**given)
        self.seen["by graph"] += 1
        if self.graph is not None:
            return self.graph.step(**given)
        self.packer.prepare_launch(**given)
        self.packer.enqueue()
        return self.packer.commit_launch()

    def take_in(self) -> None:
        """Compare the oldest step as it came, then without the rows of handles that have ended since."""
        expected, ticket = self.in_flight.pop(0)
        self.reference.compare(expected, ticket)
        header = ticket.launched.result().header_words
        self.seen.update({name: header[i] for i, name in enumerate(L.HEADER_FIELDS)})
        packed = ticket.wait()
        self.reference.compare_taken(expected, packed)
        packed.release()

    def batch(self) -> NDArray[np.int64]:
        """Handles in random order: live ones, each once, and some that have ended, are padding or nonsense."""
        size = int(self.draws.pick(*self.sizes, self.config.batch_capacity))
        others = int(self.draws.rng.integers(0, 1 + size // 4))
        live = self.draws.rng.permutation(np.array(list(self.requests), np.int64))[: size - others].tolist()
        more = [self.draws.pick(L.PADDING_HANDLE, *self.nonsense, *self.ended[-20:]) for _ in range(size - len(live))]
        return self.draws.rng.permutation(np.array([*live, *more], np.int64))

    def placed(self, name: str, array: NDArray[Any]) -> Any:
        """An input on the host or, aligned or not, on the device."""
        if not self.place.cuda or self.draws.chance(0.3):
            return array
        if name.endswith("_lens"):  # on a device they are int32
            return self.place.tensor(array.astype(np.int32))
        shift = int(self.draws.rng.integers(0, 4))
        padded = np.zeros(array.size + shift, array.dtype)
        padded[shift:] = array.ravel()
        return self.place.tensor(padded)[shift:].view(array.shape)
