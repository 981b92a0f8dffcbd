"""Two packers that live the same random life: the CPU backend, and the kernel on a runtime under test.

After every launch the whole output buffer, poison included, and the whole arena must be equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ptxsim_runtime import reads_reused_slot

from gpupack.backends.cuda.backend import TritonBackend
from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.request import NO_LIMIT, Request
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer, Ticket

POISON = np.int32(0x7EADBEEF)
ODD_BITS = np.array([0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F800001, 0x80000000, 0x00000001], np.uint32)


@dataclass(frozen=True)
class Case:
    """A configuration and the shape of its launches."""

    config: PackerConfig
    block: int
    warps: int


class Twins:
    """The two packers, and what is done to both."""

    def __init__(self, case: Case, runtime: Any, seed: int) -> None:
        self.config, self.block = case.config, case.block
        self.cpu, self.device = Packer(case.config), Packer(case.config)
        self.backend = TritonBackend(case.config, runtime, block=case.block, warps=case.warps)
        self.device.backend = self.backend
        self.rng = np.random.default_rng(seed)
        self.requests: dict[int, Request] = {}
        self.in_flight: list[tuple[Ticket, Ticket]] = []
        # Never given; slots that are not there, near and far; nonsense.
        self.nonsense = [99 << 32, (1 << 32) + case.config.capacity, (1 << 32) + 2**31, (1 << 63) - 1, -2]
        self.ended: list[int] = []
        self.admitted = 0
        self.seen: Counter[str] = Counter()

    # --- life of a handle -------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def request(self) -> Request:
        self.admitted += 1
        scored = self.config.logprobs and self.chance(0.6)
        return Request(
            f"r{self.admitted}",
            max_new_tokens=self.pick(NO_LIMIT, NO_LIMIT, 30, 12, 5, 2, 1, 0),
            stream=self.chance(0.7),
            stream_interval=self.pick(None, 1, 2, 3, 50, 50),
            stop_token_ids=self.rng.integers(0, self.config.vocab_size, int(self.rng.integers(0, 5))).tolist(),
            ignore_eos=self.chance(0.2),
            judge=self.pick("device", "device", "device", "engine"),
            return_logprob=scored,
            top_logprobs_num=int(self.rng.integers(0, self.config.max_top_logprobs + 1)) * scored,
            token_ids_logprob=[5] * int(self.rng.integers(0, self.config.max_token_ids_logprobs + 1)) * scored,
        )

    def admit(self, requests: list[Request], resumes: list[Any] | None = None) -> None:
        handles = self.cpu.admit(requests, resumes)
        assert handles.tolist() == self.device.admit(requests, resumes).tolist()
        self.requests |= dict(zip(handles.tolist(), requests, strict=True))

    def churn(self) -> None:
        """Some requests end, some of those come back, new ones come; some slots stay free."""
        if self.chance(0.7):
            while self.in_flight:
                self.take_in()
        for handle in self.rng.permutation(list(self.requests)).tolist():
            flags = int(self.cpu.backend.state_row(handle & 0xFFFFFFFF)[L.FLAGS])
            finished = bool(flags & L.STATE_FINISHED)
            if not self.chance(0.6 if finished else 0.1):
                continue
            request = self.requests.pop(handle)
            self.ended.append(handle)
            if finished or flags & L.STATE_CONVEYED or self.in_flight or self.chance(0.3):
                for packer in (self.cpu, self.device):
                    packer.retire(np.array([handle], np.int64))
                continue
            one, other = self.cpu.retract(handle), self.device.retract(handle)
            assert one.unsent_tokens.tolist() == other.unsent_tokens.tolist()
            assert one.unsent_families.tolist() == other.unsent_families.tolist()
            assert one.spec_counts.tolist() == other.spec_counts.tolist()
            assert one.unsent_logprobs.view(np.int32).tolist() == other.unsent_logprobs.view(np.int32).tolist()
            self.admit([request], [one])
            self.seen["readmitted"] += 1
        room = self.config.capacity - len(self.requests)
        self.admit([self.request() for _ in range(int(self.rng.integers(room // 3, room + 1)))])

    # --- one launch -------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """Batch sizes on both sides of every block."""
        most = self.config.batch_capacity
        around = [blocks * self.block + more for blocks in range(most // self.block + 1) for more in (-1, 0, 1)]
        return [size for size in (*around, most, most, most) if 0 <= size <= most]

    def batch(self) -> NDArray[np.int64]:
        """Handles in random order: live ones, each once, and some that have ended, are padding or nonsense."""
        size = self.pick(*self.sizes())
        others = int(self.rng.integers(0, 1 + size // 4))
        handles = self.rng.permutation(list(self.requests))[: size - others].tolist()
        while len(handles) < size:
            handles.append(self.pick(L.PADDING_HANDLE, *self.nonsense, *self.ended[-20:]))
        return self.rng.permutation(np.array(handles, np.int64)) if size else np.zeros(0, np.int64)

    def tokens(self, rows: int, width: int) -> NDArray[Any]:
        """Token ids of either width, with ids outside the vocabulary, at any alignment."""
        wide = self.chance(0.5)
        dtype, vocab = np.dtype(np.int64 if wide else np.int32), self.config.vocab_size
        shift = int(self.rng.integers(0, 4))
        tokens = np.zeros(rows * width + shift, dtype)[shift:]
        tokens[:] = self.rng.integers(0, vocab, tokens.shape)
        outside = [vocab, -1, 2**31 - 1, -(2**31)] + [2**40, -(2**40), 2**32 + 1, -(2**32) + 1] * wide
        bad = self.rng.random(tokens.shape) < 0.02
        tokens[bad] = self.rng.choice(np.array(outside, dtype), int(bad.sum()))
        return tokens.reshape(rows, width)

    def scores(self, rows: int, width: int) -> NDArray[np.float32]:
        """Any bit pattern."""
        bits = self.rng.integers(0, 2**32, (rows, width), np.uint32)
        odd = self.rng.random(bits.shape) < 0.2
        bits[odd] = self.rng.choice(ODD_BITS, int(odd.sum()))
        return bits.view(np.float32)

    def control(self, handles: NDArray[np.int64], lens: NDArray[Any]) -> Control:
        """What the host asks; all of it valid, some of it of rows that are not there."""
        control = Control(max(1, len(handles))).reset(len(handles))
        ways = [0] * 8 + [
            L.CONTROL_SKIP,
            L.CONTROL_HOLD,
            L.CONTROL_HOLD,
            L.CONTROL_FLUSH,
            L.CONTROL_FINISH,
            L.CONTROL_RETRACTED,
        ]
        for i, handle in enumerate(handles.tolist()):
            way = self.pick(*ways)
            control.flags[i] = way
            length = int(lens[i])
            if handle in self.requests:
                length += int(self.cpu.backend.state_row(handle & 0xFFFFFFFF)[L.OUTPUT_LEN])
            if way == L.CONTROL_FINISH:
                end = self.pick(-1, max(0, length - int(self.rng.integers(0, 6))))
                control.finish(i, int(self.rng.integers(1, 6)), finished_len=end, match=int(self.rng.integers(-9, 99)))
            elif self.chance(0.2):
                back = int(self.rng.integers(0, self.config.visible_limit))
                control.visible_len[i] = max(0, length - back)
        return control

    def launch(self) -> None:
        """One step, append or pack on both, and everything compared."""
        if len(self.in_flight) == self.config.max_in_flight or (self.in_flight and self.chance(0.5)):
            self.take_in()
        handles, kind = self.batch(), self.pick("step", "step", "step", "step", "append", "pack")
        ones = self.chance(0.3)
        lens = self.rng.integers(0, self.config.max_accept + 1, len(handles), self.pick(np.int32, np.int64))
        lens = lens * 0 + 1 if ones else lens
        given: dict[str, Any] = {} if kind == "append" else {"return_logprob": self.chance(0.7)}
        if kind != "append" and self.chance(0.5):
            given["control"] = self.control(handles, lens * (kind == "step"))
        inputs = []
        if kind != "pack":
            width = self.config.max_accept + int(self.rng.integers(0, 3))
            inputs = [self.tokens(len(handles), width)]
            given["accept_lens"] = None if ones else lens
            if self.config.logprobs:
                given["logprobs"] = self.scores(len(handles), self.config.max_accept + int(self.rng.integers(0, 3)))
            self.extras(len(handles), given)
        self.backend.runtime.allow = [reads_reused_slot] if self.reuses(handles) else []  # type: ignore[attr-defined]
        self.cpu.backend._free[-1].fill(POISON)  # type: ignore[attr-defined]
        self.backend.ring.take().out.fill(POISON)
        calls = [getattr(packer, kind)(handles, *inputs, **given) for packer in (self.cpu, self.device)]
        self.in_flight.append((calls[0], calls[1]))
        self.compare(calls[0], calls[1])

    def extras(self, rows: int, given: dict[str, Any]) -> None:
        """Top-k and token-ids logprobs, and speculative lens, as far as the configuration has them."""
        config, positions = self.config, self.config.max_accept + int(self.rng.integers(0, 2))
        if config.max_top_logprobs:
            width = config.max_top_logprobs + int(self.rng.integers(0, 2))
            given["top_logprobs_val"] = self.scores(rows, positions * width).reshape(rows, positions, width)
            ids = self.rng.integers(0, 2**31, (rows, positions, width), self.pick(np.int32, np.int64))
            given["top_logprobs_idx"] = ids
        if config.max_token_ids_logprobs:
            width = config.max_token_ids_logprobs
            given["token_ids_logprobs_val"] = self.scores(rows, positions * width).reshape(rows, positions, width)
        if config.speculative and self.chance(0.7):
            given["block_accept_lens"] = self.rng.integers(0, 9, rows, self.pick(np.int32, np.int64))
        if config.speculative and self.chance(0.7):
            given["cap_lens"] = self.rng.integers(0, config.max_accept + 1, rows, self.pick(np.int32, np.int64))

    def reuses(self, handles: NDArray[np.int64]) -> bool:
        """Whether an ended handle of the batch names the slot of a live one."""
        live = np.isin(handles, list(self.requests))
        ended = handles[~live & (handles >= 0)]
        return bool(np.isin(ended & 0xFFFFFFFF, handles[live] & 0xFFFFFFFF).any())

    def compare(self, cpu: Ticket, device: Ticket) -> None:
        expected, got = cpu.launched.result().buffer, device.launched.result().buffer
        names = dict(enumerate(L.HEADER_FIELDS))
        for i, name in names.items():
            assert got[i] == expected[i], f"header {name}: expected {expected[i]}, got {got[i]}"
            self.seen[name] += int(expected[i])
        unused = got[len(names) : L.HEADER_WORDS]
        assert (unused == POISON).all(), "header words without a name were written"
        differ = np.flatnonzero(expected[L.HEADER_WORDS :] != got[L.HEADER_WORDS :]) + L.HEADER_WORDS
        assert not len(differ), f"words {differ[:8]}: expected {expected[differ[:8]]}, got {got[differ[:8]]}"
        arenas = self.cpu.backend.arenas  # type: ignore[attr-defined]
        arena = np.concatenate([part.ravel() for part in arenas.parts])
        differ = np.flatnonzero(arena != self.backend.arena.numpy())
        assert not len(differ), f"arena words {differ[:8]} differ"

    def take_in(self) -> None:
        for ticket in self.in_flight.pop(0):
            ticket.wait().release()
