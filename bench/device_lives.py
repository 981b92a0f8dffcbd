"""Random lives of requests on a device and on the reference at once: everything equal, to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from device_place import Place
from device_reference import POISON, CpuReference, MismatchError, OracleReference, Reference, expect
from numpy.typing import NDArray

from gpupack import layout as L
from gpupack.config import EmitPolicy, PackerConfig, Transfer
from gpupack.control import Control
from gpupack.packer import Packer
from gpupack.request import NO_LIMIT, Request
from gpupack.ticket import Ticket

Row = dict[str, Any]
COMMON: dict[str, Any] = {"vocab_size": 60, "eos_token_ids": (2, 7), "max_in_flight": 3, "fallback": False}
ODD_BITS = np.array([0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F800001, 0x80000000, 0x00000001], np.uint32)
WAYS = np.array(
    [0] * 8
    + [
        L.CONTROL_SKIP,
        L.CONTROL_HOLD,
        L.CONTROL_HOLD,
        L.CONTROL_FLUSH,
        L.CONTROL_FINISH,
        L.CONTROL_RETRACTED,
    ],
    np.int32,
)
SEEN = ("rows", "tokens", "stale", "early", "held", "finished", "conveyed", "readmitted", "by graph")


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
        missing = [name for name in SEEN if not met[name]] if each * seeds >= 200 else []
        yield {"check": f"{case.name}: met everything", "passed": not missing, "detail": f"never: {missing}" * bool(missing)}


class Life:
    """One packer on the device and its reference, and what is done to both."""

    def __init__(self, place: Place, case: Case, seed: int) -> None:
        self.config = config = PackerConfig(**COMMON, **case.options, transfer=case.transfer, device=place.name)
        self.place = place
        self.packer = Packer(config, stream=place.stream() if case.named_stream else None)
        self.backend: Any = self.packer.backend
        self.reference: Reference = CpuReference(config) if place.numba else OracleReference(config)
        self.graph = self.packer.capture() if place.cuda else None
        self.rng = np.random.default_rng(seed)
        self.requests: dict[int, Request] = {}
        self.in_flight: list[tuple[Any, Ticket]] = []
        self.ended: list[int] = []
        # Never given; slots that are not there, near and far; nonsense.
        self.nonsense = [99 << 32, (1 << 32) + config.capacity, (1 << 32) + 2**31, (1 << 63) - 1, -2]
        self.admitted = 0
        self.seen: Counter[str] = Counter()
        block, most = self.backend.shape.block, config.batch_capacity
        sizes = {blocks * block + more for blocks in range(most // block + 1) for more in (-1, 0, 1)}
        self.sizes = sorted({0, 1, 2, 7, most - 1, most} | {size for size in sizes if 0 <= size <= most})

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    # --- life of a handle -------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """Now and then some come and go; then a launch."""
        if number % 4 == 0:
            self.churn()
        self.launch()
        if self.chance(0.2):
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
        while self.in_flight and self.chance(0.8):
            self.take_in()
        for handle in self.rng.permutation(np.array(list(self.requests), np.int64)).tolist():
            finished, conveyed = self.reference.ended(handle)
            if not self.chance(0.6 if finished else 0.1):
                continue
            request = self.requests.pop(handle)
            self.ended.append(handle)
            if finished or conveyed or self.in_flight or self.chance(0.3):
                self.packer.retire(np.array([handle], np.int64))
                self.reference.retire(handle)
                continue
            one, other = self.reference.retract(handle), self.packer.retract(handle)
            for name in ("output_len", "unsent_tokens", "unsent_families", "spec_counts"):
                expect(f"resume.{name}", getattr(one, name), getattr(other, name))
            expect("resume.unsent_logprobs", one.unsent_logprobs.view(np.int32), other.unsent_logprobs.view(np.int32))
            self.admit([request], [one])
            self.seen["readmitted"] += 1
        room = self.config.capacity - len(self.requests)
        self.admit([self.request() for _ in range(int(self.rng.integers(room // 3, room + 1)))], None)

    def admit(self, requests: list[Request], resumes: list[Any] | None) -> None:
        handles = self.packer.admit(requests, resumes).tolist()
        expect("handles", self.reference.admit(requests, resumes or [None] * len(requests)), handles)
        self.requests |= dict(zip(handles, requests, strict=True))

    def request(self) -> Request:
        self.admitted += 1
        config, scored = self.config, self.chance(0.6)
        return Request(
            f"r{self.admitted}",
            max_new_tokens=self.pick(NO_LIMIT, NO_LIMIT, 30, 12, 5, 2, 1, 0),
            stream=self.chance(0.7),
            stream_interval=self.pick(None, 1, 2, 3, 50, 50),
            stop_token_ids=self.rng.integers(0, config.vocab_size, int(self.rng.integers(0, 5))).tolist(),
            ignore_eos=self.chance(0.2),
            judge=self.pick("device", "device", "device", "engine"),
            return_logprob=scored,
            top_logprobs_num=int(self.rng.integers(0, config.max_top_logprobs + 1)) * scored,
            token_ids_logprob=[5] * int(self.rng.integers(0, config.max_token_ids_logprobs + 1)) * scored,
        )

    # --- one launch -------------------------------------------------------------------------------

    def launch(self) -> None:
        """One step, append or pack on both; what is in flight stays so for a while."""
        if len(self.in_flight) == self.config.max_in_flight or (self.in_flight and self.chance(0.4)):
            self.take_in()
        handles, kind = self.batch(), self.pick("step", "step", "step", "step", "append", "pack")
        rows, ones = len(handles), self.chance(0.3)
        lens = self.rng.integers(0, self.config.max_accept + 1, rows, self.pick(np.int32, np.int64))
        lens = lens * 0 + 1 if ones else lens
        given: dict[str, Any] = {} if kind == "append" else {"return_logprob": self.chance(0.7)}
        if kind != "append" and self.chance(0.5):
            given["control"] = self.control(handles, lens * (kind == "step"))
        arrays: dict[str, Any] = {"handles": handles}
        if kind != "pack":
            arrays |= self.inputs(rows) | ({} if ones else {"accept_lens": lens})
        expected = self.reference.launch(kind, **arrays, **given)
        if self.config.transfer == "mapped":
            self.backend.ring.take().out.fill(POISON)
        by_graph = kind != "append" and self.chance(0.3)
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
        size = int(self.pick(*self.sizes, self.config.batch_capacity))
        others = int(self.rng.integers(0, 1 + size // 4))
        live = self.rng.permutation(np.array(list(self.requests), np.int64))[: size - others].tolist()
        more = [self.pick(L.PADDING_HANDLE, *self.nonsense, *self.ended[-20:]) for _ in range(size - len(live))]
        return self.rng.permutation(np.array([*live, *more], np.int64))

    def inputs(self, rows: int) -> dict[str, Any]:
        """What a step takes in, as far as the configuration has it: ids outside the vocabulary, any bit patterns."""
        config, positions = self.config, self.config.max_accept + int(self.rng.integers(0, 2))
        wide = self.chance(0.5)
        tokens = self.rng.integers(0, config.vocab_size, (rows, positions), np.int64 if wide else np.int32)
        outside = [config.vocab_size, -1, 2**31 - 1, -(2**31)] + [2**40, -(2**40), 2**32 + 1, -(2**32) + 1] * wide
        bad = self.rng.random(tokens.shape) < 0.01
        tokens[bad] = self.rng.choice(np.array(outside, tokens.dtype), int(bad.sum()))
        given: dict[str, Any] = {"token_ids": tokens, "logprobs": self.scores(rows, positions)}
        if config.max_top_logprobs:
            shape = (rows, positions, config.max_top_logprobs + int(self.rng.integers(0, 2)))
            given["top_logprobs_val"] = self.scores(*shape)
            given["top_logprobs_idx"] = self.rng.integers(0, 2**31, shape, self.pick(np.int32, np.int64))
        if config.max_token_ids_logprobs:
            given["token_ids_logprobs_val"] = self.scores(rows, positions, config.max_token_ids_logprobs)
        if config.speculative and self.chance(0.7):
            given["block_accept_lens"] = self.rng.integers(0, 9, rows, self.pick(np.int32, np.int64))
        if config.speculative and self.chance(0.7):
            given["cap_lens"] = self.rng.integers(0, config.max_accept + 1, rows, self.pick(np.int32, np.int64))
        return given

    def scores(self, *shape: int) -> NDArray[np.float32]:
        """Any bit pattern."""
        bits = self.rng.integers(0, 2**32, shape, np.uint32)
        odd = self.rng.random(shape) < 0.2
        bits[odd] = self.rng.choice(ODD_BITS, int(odd.sum()))
        return bits.view(np.float32)

    def placed(self, name: str, array: NDArray[Any]) -> Any:
        """An input on the host or, aligned or not, on the device."""
        if not self.place.cuda or self.chance(0.3):
            return array
        if name.endswith("_lens"):  # on a device they are int32
            return self.place.tensor(array.astype(np.int32))
        shift = int(self.rng.integers(0, 4))
        padded = np.zeros(array.size + shift, array.dtype)
        padded[shift:] = array.ravel()
        return self.place.tensor(padded)[shift:].view(array.shape)

    def control(self, handles: NDArray[np.int64], lens: NDArray[Any]) -> Control:
        """What the host asks; all of it valid, some of it of rows that are not there."""
        rows = len(handles)
        control = Control(max(1, rows)).reset(rows)
        live = np.isin(handles, np.array(list(self.requests), np.int64))
        lengths = lens.astype(np.int64)
        lengths[live] += self.reference.output_lens(handles[live].tolist())
        control.flags[:] = self.rng.choice(WAYS, rows)
        finish = control.flags == L.CONTROL_FINISH
        control.finish_code[finish] = self.rng.integers(1, 6, int(finish.sum()))
        control.match[finish] = self.rng.integers(-9, 99, int(finish.sum()))
        cut = finish & (self.rng.random(rows) < 0.5)
        control.finished_len[cut] = np.maximum(lengths - self.rng.integers(0, 6, rows), 0)[cut]
        seen = ~finish & (self.rng.random(rows) < 0.2)
        back = self.rng.integers(0, self.config.visible_limit, rows)
        control.visible_len[seen] = np.maximum(lengths - back, 0)[seen]
        return control
