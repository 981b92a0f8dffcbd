"""What a packer on a device is compared with: the CPU backend, or the oracle where Numba is not installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Request, Resume
from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket

POISON = np.int32(0x7EADBEEF)


class MismatchError(AssertionError):
    """The device did something else than the reference."""


def expect(what: str, expected: Any, got: Any) -> None:
    """MismatchError that says where two arrays or values differ."""
    expected, got = np.asarray(expected), np.asarray(got)
    if expected.shape != got.shape:
        raise MismatchError(f"{what}: expected shape {expected.shape}, got {got.shape}")
    differ = np.argwhere(expected != got)
    if len(differ):
        at = tuple(differ[0])
        where = f"{expected[at]} at {list(map(int, at))}"
        raise MismatchError(f"{what}: expected {where}, got {got[at]}; {len(differ)} differ")


class CpuReference:
    """The CPU backend: every word of a step and of the arenas is compared."""

    name = "the CPU backend"

    def __init__(self, config: PackerConfig) -> None:
        self.packer = Packer(replace(config, device="cpu"))
        self._whole = config.transfer == "mapped"  # a copy may bring words that this step did not write

    def admit(self, requests: list[Request], resumes: list[Resume | None]) -> list[int]:
        return self.packer.admit(requests, resumes).tolist()

    def retire(self, handles: NDArray[np.int64]) -> None:
        self.packer.retire(handles)

    def retract(self, handle: int) -> Resume:
        return self.packer.retract(handle)

    def launch(self, kind: str, *inputs: Any, **given: Any) -> Any:
        self.packer.backend._free[-1].fill(POISON)  # type: ignore[attr-defined]
        return getattr(self.packer, kind)(*inputs, **given)

    def standing(self, live: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which of live handles have finished, and which the host judges."""
        flags = self.packer.backend.arenas.state[live & 0xFFFFFFFF, L.FLAGS]  # type: ignore[attr-defined]
        return flags & L.STATE_FINISHED != 0, flags & L.STATE_CONVEYED != 0

    def output_lens(self, live: NDArray[np.int64]) -> NDArray[np.int64]:
        """Output lengths of live handles."""
        state = self.packer.backend.arenas.state  # type: ignore[attr-defined]
        return state[live & 0xFFFFFFFF, L.OUTPUT_LEN].astype(np.int64)

    def compare(self, expected: Any, got: Ticket) -> None:
        """Two launched steps, as they came."""
        one, other = expected.launched.result(), got.launched.result()
        same_step(one, other)
        if self._whole:  # and not a word beside
            named = len(L.HEADER_FIELDS)
            beside = other.buffer[named : L.HEADER_WORDS]
            expect("header words without a name", np.full_like(beside, POISON), beside)
            expect("packed step", one.buffer[L.HEADER_WORDS :], other.buffer[L.HEADER_WORDS :])

    def compare_taken(self, expected: Any, got: PackedStep) -> None:
        """Take the expected step in, too: what is left of both after rows of ended handles were dropped."""
        with_rows = expected.wait()
        same_step(with_rows, got)
        with_rows.release()

    def compare_state(self, arena: NDArray[np.int32]) -> None:
        """All state, rings and counters."""
        parts = self.packer.backend.arenas.parts  # type: ignore[attr-defined]
        expect("arena", np.concatenate([part.ravel() for part in parts]), arena)


class OracleReference:
    """`tests/oracle.py`: rows and counters are compared. Imports pytest and hypothesis."""

    name = "the oracle"

    def __init__(self, config: PackerConfig) -> None:
        from oracle import Oracle

        self.oracle = Oracle(config)

    def admit(self, requests: list[Request], resumes: list[Resume | None]) -> list[int]:
        return self.oracle.admit(requests, resumes)

    def retire(self, handles: NDArray[np.int64]) -> None:
        self.oracle.retire(handles)

    def retract(self, handle: int) -> Resume:
        return self.oracle.retract(handle)

    def launch(self, kind: str, *inputs: Any, **given: Any) -> Any:
        return getattr(self.oracle, kind)(*inputs, **given)

    def standing(self, live: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which of live handles have finished, and which the host judges."""
        records = [self.oracle.records[handle] for handle in live.tolist()]
        finished = np.array([record.finished for record in records], np.bool_)
        return finished, np.array([record.conveyed for record in records], np.bool_)

    def output_lens(self, live: NDArray[np.int64]) -> NDArray[np.int64]:
        """Output lengths of live handles."""
        return np.array([self.oracle.records[handle].output_len for handle in live.tolist()], np.int64)

    def compare(self, expected: Any, got: Ticket) -> None:
        """Two launched steps, as they came."""
        from test_lives import counters_of, expected_counters, rows_of

        packed = got.launched.result()
        counters, wanted = counters_of(packed), expected_counters(expected.launched)
        if counters != wanted:
            raise MismatchError(f"header: expected {wanted}, got {counters}")
        for one, other in zip(expected.launched.rows, rows_of(packed), strict=True):
            if one != other:
                raise MismatchError(f"row: expected {one}, got {other}")

    def compare_taken(self, expected: Any, got: PackedStep) -> None:
        """Take the expected step in, too: who is left after rows of ended handles were dropped."""
        expect("handles", [row.handle for row in expected.wait().rows], got.handles)

    def compare_state(self, arena: NDArray[np.int32]) -> None:
        """The oracle has no arena; what is in it shows in later rows."""


Reference = CpuReference | OracleReference


def same_step(one: PackedStep, other: PackedStep) -> None:
    """Everything that two packed steps say."""
    expect("header", one.header_words[: len(L.HEADER_FIELDS)], other.header_words[: len(L.HEADER_FIELDS)])
    for field, name in enumerate(L.ROW_FIELDS):
        expect(name, one.column(field), other.column(field))
    for field in range(one.spec_width):
        expect(f"speculative counter {field}", one.spec(field), other.spec(field))
    expect("token_ids", one.token_ids, other.token_ids)
    expect("logprobs", one.logprobs.view(np.int32), other.logprobs.view(np.int32))
    expect("families", one.families, other.families)
