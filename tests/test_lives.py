"""Random lives through the Oracle and a Packer: rows, counters and the state left behind, bit for bit.

A further backend joins by adding a `Harness` to `HARNESSES`. `GPUPACK_LIVES=20000` plays more of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from oracle import CODES, Oracle, OracleTicket, Record, Row, Step
from strategies import ODD_BITS, Admit, Batch, End, Life, Readmit, RowPlan, TakeIn, lives

from gpupack.backends.cpu.input_checks import LIMIT_RUN
from gpupack.core import layout as L
from gpupack.core.config import EmitPolicy, PackerConfig
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import Request, Resume
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer, Ticket

LIVES = int(os.environ.get("GPUPACK_LIVES", "400"))
POISON = 0x7EADBEEF
INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class Harness:
    """A backend under test: how its packer is made, and how its free buffers are poisoned."""

    name: str
    make: Callable[..., Packer]
    poison: Callable[[Packer, int], None]


def poison_cpu(packer: Packer, word: int) -> None:
    assert packer.backend._free
    for buffer in packer.backend._free:
        buffer.fill(word)


def packer_of_runs(config: PackerConfig, **options: Any) -> Packer:
    """A packer to which one row is a run already: batches of lives are small."""
    packer = Packer(config, **options)
    packer.backend._limits[LIMIT_RUN] = 1
    return packer


HARNESSES = [Harness("cpu", Packer, poison_cpu), Harness("cpu, in runs", packer_of_runs, poison_cpu)]


@pytest.fixture(params=HARNESSES, ids=lambda harness: harness.name, scope="module")
def harness(request: pytest.FixtureRequest) -> Harness:
    return request.param


# --- Comparing ------------------------------------------------------------------------------------


def rows_of(packed: PackedStep) -> list[Row]:
    """A packed step as the oracle's rows."""
    names = {"final": L.ROW_FINAL, "early": L.ROW_EARLY, "conveyed": L.ROW_CONVEYED}
    names["hidden token"] = L.ROW_HIDDEN_TOKEN
    families, spec = packed.families.tolist(), [packed.spec(field).tolist() for field in range(packed.spec_width)]
    handles, bits = packed.handles.tolist(), packed.logprobs.view(np.uint32).tolist()
    tokens, columns = packed.token_ids.tolist(), [packed.column(field).tolist() for field in range(L.ROW_WIDTH)]
    token_indptr, logprob_indptr = columns[L.R_TOKEN_INDPTR], columns[L.R_LOGPROB_INDPTR]
    families_indptr = columns[L.R_FAMILIES_INDPTR]
    assert token_indptr[0] == logprob_indptr[0] == families_indptr[0] == 0
    assert families_indptr[-1] == len(families)
    assert token_indptr[-1] == len(tokens)
    assert logprob_indptr[-1] == len(bits)
    rows = []
    for i, handle in enumerate(handles):
        column = [values[i] for values in columns]
        flags = column[L.R_FLAGS]
        named = frozenset(name for name, bit in names.items() if flags & bit)
        assert flags == sum(names[name] for name in named) | flags >> 8 << 8, "no flag without a name"
        rows.append(
            Row(
                column[L.R_BATCH_INDEX], handle, named, CODES[flags >> L.ROW_CODE_SHIFT], column[L.R_VISIBLE_LEN],
                column[L.R_MATCH], column[L.R_TOKEN_START], column[L.R_LOGPROB_START],
                tuple(tokens[token_indptr[i] : token_indptr[i + 1]]),
                tuple(bits[logprob_indptr[i] : logprob_indptr[i + 1]]),
                tuple(families[families_indptr[i] : families_indptr[i + 1]]), tuple(counts[i] for counts in spec),
            )
        )  # fmt: skip
    return rows


def counters_of(packed: PackedStep) -> dict[str, int]:
    return {name: packed.header(i) for i, name in enumerate(L.HEADER_FIELDS)}


def expected_counters(step: Step) -> dict[str, int]:
    return {
        "launch": step.launch,
        "batch": step.batch,
        "rows": len(step.rows),
        "conveyed": step.conveyed,
        "tokens": sum(len(row.token_ids) for row in step.rows),
        "logprobs": sum(len(row.logprobs) for row in step.rows),
        "stale": step.stale,
        "late": step.late,
        "early": step.early,
        "held": step.held,
        "finished": step.finished,
        "error": 0,
        "families": sum(len(row.families) for row in step.rows),
    }


def state_of(packer: Packer, handle: int) -> dict[str, Any]:
    """What a packer keeps of a live handle, unsent items included."""
    slot = handle & 0xFFFFFFFF
    state = packer.backend.state_row(slot)
    flags = int(state[L.FLAGS])
    length, token_cursor, logprob_cursor = (int(state[f]) for f in (L.OUTPUT_LEN, L.TOKEN_CURSOR, L.LOGPROB_CURSOR))
    running = not flags & L.STATE_FINAL_SENT
    unsent = packer.backend.unsent(slot, token_cursor, length) if running else np.empty(0, np.int32)
    scores = families = np.empty(0, np.int32)
    if running and flags & L.STATE_LOGPROBS:
        scores = packer.backend.unsent(slot, logprob_cursor, length, L.CHANNEL_LOGPROBS)
        families = packer.backend.unsent(slot, logprob_cursor, length, L.CHANNEL_FAMILIES)
    return {
        "generation": int(state[L.GENERATION]),
        "live": bool(flags & L.STATE_LIVE),
        "code": CODES[flags >> L.CODE_SHIFT & L.CODE_MASK],
        "finished": bool(flags & L.STATE_FINISHED),
        "final_sent": bool(flags & L.STATE_FINAL_SENT),
        "output_len": length,
        "finished_len": int(state[L.FINISHED_LEN]),
        "token_cursor": token_cursor,
        "logprob_cursor": logprob_cursor,
        "match": int(state[L.MATCH]),
        "unsent": unsent.tolist(),
        "unsent_bits": scores.view(np.uint32).tolist(),
        "unsent_families": families.tolist(),
        "spec": packer.backend.spec_row(slot).tolist(),
    }


def expected_state(handle: int, record: Record) -> dict[str, Any]:
    running = not record.final_sent
    scores = running and record.request.return_logprob
    return {
        "generation": handle >> 32,
        "live": True,
        "code": record.code,
        "finished": record.finished,
        "final_sent": record.final_sent,
        "output_len": record.output_len,
        "finished_len": -1 if record.finished_len is None else record.finished_len,
        "token_cursor": record.token_cursor,
        "logprob_cursor": record.logprob_cursor,
        "match": record.match,
        "unsent": record.tokens[record.token_cursor :] if running else [],
        "unsent_bits": record.logprobs[record.logprob_cursor :] if scores else [],
        "unsent_families": [w for words in record.families[record.logprob_cursor :] if scores for w in words],
        "spec": record.spec,
    }


def check_guards(packed: PackedStep, launched: Step, word: int) -> None:
    """Whatever is not a declared row or item of the launched step still holds the poison."""
    geometry, rows = packed.geometry, len(launched.rows)
    untouched = packed.buffer == np.int32(word)
    untouched[: L.HEADER_WORDS] = True
    for column in range(L.ROW_WIDTH + packed.spec_width):
        entries = rows + (L.R_TOKEN_INDPTR <= column < L.ROW_WIDTH)
        untouched[geometry.column(column) :][:entries] = True
    untouched[geometry.tokens :][: sum(len(row.token_ids) for row in launched.rows)] = True
    untouched[geometry.logprobs :][: sum(len(row.logprobs) for row in launched.rows)] = True
    untouched[geometry.families :][: sum(len(row.families) for row in launched.rows)] = True
    assert untouched.all(), f"written outside the declared items at words {np.flatnonzero(~untouched)}"


def same_resume(one: Resume, other: Resume) -> bool:
    return (
        (one.output_len, one.token_cursor, one.logprob_cursor, one.opened, one.restarted)
        == (other.output_len, other.token_cursor, other.logprob_cursor, other.opened, other.restarted)
        and one.unsent_families.tolist() == other.unsent_families.tolist()
        and one.spec_counts.tolist() == other.spec_counts.tolist()
        and one.unsent_tokens.tolist() == other.unsent_tokens.tolist()
        and one.unsent_logprobs.view(np.uint32).tolist() == other.unsent_logprobs.view(np.uint32).tolist()
    )


# --- Playing --------------------------------------------------------------------------------------


class Play:
    """Plays a life on a packer and on the oracle, comparing after everything that it does."""

    def __init__(self, harness: Harness, config: PackerConfig, convey: bool) -> None:
        self.harness = harness
        self.config = config
        self.packer = harness.make(config, convey=convey)
        self.oracle = Oracle(config, convey=convey)
        self.in_flight: list[tuple[Ticket, OracleTicket]] = []
        self.retracted: list[tuple[Request, Resume, Resume]] = []
        self.ended = [99 << 32, (1 << 32) + config.capacity + 5, -2]  # never given; a slot that is not there; nonsense
        self.fresh = 0

    def play(self, life: Life) -> None:
        for op in life.ops:
            self.do(op)
            self.compare_states()
        while self.in_flight:
            self.take_in()
        self.compare_states()

    def do(self, op: Any) -> None:
        if isinstance(op, Batch):
            for _ in range(op.times):
                self.launch(op)
                self.compare_states()
        elif isinstance(op, TakeIn):
            if self.in_flight:
                self.take_in()
        elif isinstance(op, Admit):
            self.admit(op.requests, [None] * len(op.requests), [None] * len(op.requests))
        elif isinstance(op, End):
            self.end(op)
        else:
            self.readmit(op)

    def compare_states(self) -> None:
        assert self.packer.slots.live_handles().tolist() == sorted(self.oracle.records, key=lambda h: h & 0xFFFFFFFF)
        assert self.packer.dropped_rows == self.oracle.dropped_rows
        for handle, record in self.oracle.records.items():
            assert state_of(self.packer, handle) == expected_state(handle, record)

    # --- handles ----------------------------------------------------------------------------------

    def admit(self, requests: list[Request], resumes: list[Any], oracle_resumes: list[Any]) -> list[int]:
        room = self.config.capacity - len(self.oracle.records)
        if not requests[:room]:
            return []
        handles = self.packer.admit(requests[:room], resumes[:room]).tolist()
        assert handles == self.oracle.admit(requests[:room], oracle_resumes[:room])
        return handles

    def readmit(self, op: Readmit) -> None:
        if not self.retracted or len(self.oracle.records) == self.config.capacity:
            return
        request, resume, oracle_resume = self.retracted.pop(op.pick % len(self.retracted))
        if op.dropped:
            resume, oracle_resume = resume.dropped(), oracle_resume.dropped()
        self.admit([request], [resume], [oracle_resume])
        event("readmit, output dropped" if op.dropped else "readmit")

    def end(self, op: End) -> None:
        if not self.oracle.records:
            return
        handle = list(self.oracle.records)[op.pick % len(self.oracle.records)]
        record = self.oracle.settled(handle)
        request = record.request
        self.ended.append(handle)
        # The cursors of a conveyed request are the gate's, and so is its retraction.
        if not op.retract or record.finished or record.conveyed:
            self.packer.retire(np.array([handle]))
            self.oracle.retire([handle])
            return
        sent = max(record.token_cursor, min(record.logprob_cursor, record.output_len))
        output_len = None if op.back == 0 and not self.in_flight else max(record.output_len - op.back, sent)
        resume = self.packer.retract(handle, output_len=output_len)
        oracle_resume = self.oracle.retract(handle, output_len=output_len)
        assert same_resume(resume, oracle_resume)
        self.retracted.append((request, resume, oracle_resume))
        event(f"retract with {len(self.in_flight)} in flight")

    # --- steps ------------------------------------------------------------------------------------

    def take_in(self) -> None:
        ticket, oracle_ticket = self.in_flight.pop(0)
        packed, expected = ticket.wait(), oracle_ticket.wait()
        rows = rows_of(packed)
        assert rows == expected.rows
        assert counters_of(packed) == expected_counters(expected)
        check_guards(packed, oracle_ticket.launched, POISON)
        for name in ("conveyed", "stale", "late", "early", "held", "finished"):
            if getattr(expected, name):
                event(name)
        for row in rows:
            event(f"finish: {row.code}")
        if len(rows) < len(oracle_ticket.launched.rows):
            event("rows dropped at take-in")
        self.received(rows)
        packed.release()

    def received(self, rows: list[Row]) -> None:
        """For plays that look at what comes out."""

    def fed(self, handle: int, tokens: list[int], bits: list[int]) -> None:
        """For plays that look at what goes in."""

    def launch(self, op: Batch) -> None:
        if len(self.in_flight) == self.config.max_in_flight:
            self.take_in()
        handles, inputs, given = self.arguments(op)
        self.harness.poison(self.packer, POISON)
        before = {handle: state_of(self.packer, handle) for handle in self.oracle.records}
        ticket = getattr(self.packer, op.kind)(handles, *inputs, **given)
        oracle_ticket = getattr(self.oracle, op.kind)(handles, *inputs, **given)
        self.in_flight.append((ticket, oracle_ticket))
        sent = {row.handle for row in oracle_ticket.launched.rows}
        for handle in before.keys() - sent:
            after = state_of(self.packer, handle)
            for name in ("token_cursor", "logprob_cursor", "final_sent"):
                assert after[name] == before[handle][name], "held, skipped or not due: every cursor stays"

    def arguments(self, op: Batch) -> tuple[Any, list[Any], dict[str, Any]]:
        """What the call that `op` stands for is given: handles, further positional arguments, the rest."""
        plans = self.resolve(op)
        handles = np.array([handle for handle, _ in plans], np.int64)
        runs = [self.run(handle, plan, op) for handle, plan in plans]
        lens = np.array([len(tokens) for tokens, _ in runs], np.int64 if op.extra else np.int32)
        control = self.control(op, plans, lens if op.kind != "pack" else lens * 0)
        given = {} if op.kind == "append" else {"control": control, "return_logprob": op.return_logprob}
        inputs = [] if op.kind == "pack" else self.inputs(op, runs, given, lens)
        for i, (handle, _) in enumerate(plans):
            skipped = control is not None and op.kind != "append" and control.flags[i] & L.CONTROL_SKIP
            if op.kind != "pack" and not skipped:
                self.fed(handle, *runs[i])
        return handles, inputs, given

    def resolve(self, op: Batch) -> list[tuple[int, RowPlan]]:
        """Handle of every row; a live handle only once (twice is an InputError)."""
        live = list(self.oracle.records)
        if op.everyone and op.rows:
            return [(handle, op.rows[i % len(op.rows)]) for i, handle in enumerate(live[: self.config.batch_capacity])]
        used, plans = set(), []
        for plan in op.rows:
            if plan.pick == 0 or (plan.pick > 1 and not live):
                handle = L.PADDING_HANDLE
            elif plan.pick == 1:
                handle = self.ended[-1 - plan.back % min(3, len(self.ended))]
            else:
                handle = live[(plan.pick - 2) % len(live)]
                if handle in used:
                    continue
            used.add(handle)
            plans.append((handle, plan))
        return plans

    def run(self, handle: int, plan: RowPlan, op: Batch) -> tuple[list[int], list[int]]:
        record = self.oracle.records.get(handle)
        tokens, bits = [], []
        odd, vocab = list(ODD_BITS.values()), self.config.vocab_size
        outside = [vocab, -1, INT32.max, INT32.min] + [2**40, -(2**40), 2**32 + 1, -(2**32) + 1] * op.wide
        for place, kind in enumerate(plan.run):
            self.fresh += 1
            stops = [*self.config.eos_token_ids, *(record.request.stop_token_ids if record else ())]
            if kind == 0 and stops:
                token = stops[(plan.back + place) % len(stops)]
            elif kind == 1 or (kind % 4 == 1 and record is not None and not record.judged):
                token = outside[(plan.back + place) % len(outside)]
            elif record is not None and not record.judged:
                token = 2000 + self.fresh
            else:
                token = self.fresh % vocab if vocab < 100 else 20 + self.fresh % (vocab - 20)
            tokens.append(token)
            bits.append(odd[plan.bits] if plan.bits < len(odd) else 0xC0000000 + self.fresh)
        return tokens, bits

    def inputs(self, op: Batch, runs: list[Any], given: dict[str, Any], lens: Any) -> list[Any]:
        """token_ids, returned; accept_lens and logprobs, put into `given`. Room behind a run holds garbage."""
        longest = max([1, *lens.tolist()])
        tokens = np.full((len(runs), longest + op.extra), self.config.vocab_size + 7, np.int64 if op.wide else np.int32)
        scores = np.full((len(runs), longest + op.extra_scores), 0x7FABCDEF, np.uint32)
        for i, (run, bits) in enumerate(runs):
            tokens[i, : len(run)], scores[i, : len(bits)] = run, bits
        ones = bool((lens == 1).all())
        if not (ones and op.flat):
            given["accept_lens"] = lens
        if ones and op.flat and tokens.shape[1] == 1:
            tokens = tokens[:, 0]
        asked = any(r.request.return_logprob for r in self.oracle.records.values())
        if asked or op.extra_scores:
            values = scores.view(np.float32)
            given["logprobs"] = values[:, 0] if ones and op.flat and scores.shape[1] == 1 else values
        self.extras(op, len(runs), longest + op.extra_scores, ones and op.flat, given)
        return [tokens]

    def extras(self, op: Batch, rows: int, positions: int, flat: bool, given: dict[str, Any]) -> None:
        """Top-k and token-ids logprobs, and speculative lens, put into `given`; as wide as configured or wider."""
        config, random = self.config, np.random.default_rng(self.fresh)
        flat = flat and positions == 1

        def values(width: int) -> Any:
            bits = random.integers(0, 2**32, (rows, positions, width), np.uint32)
            return bits.view(np.float32)[:, 0] if flat else bits.view(np.float32)

        if config.max_top_logprobs:
            given["top_logprobs_val"] = values(config.max_top_logprobs + op.extra)
            ids = random.integers(0, 2**31, given["top_logprobs_val"].shape, np.int64 if op.wide else np.int32)
            given["top_logprobs_idx"] = ids
        if config.max_token_ids_logprobs:
            given["token_ids_logprobs_val"] = values(config.max_token_ids_logprobs + op.extra)
        if config.speculative and op.lens:
            given["block_accept_lens"] = random.integers(0, 99, rows, np.int64 if op.wide else np.int32)
            if op.lens > 1:
                given["cap_lens"] = random.integers(0, config.max_accept + 1, rows, np.int32)

    def control(self, op: Batch, plans: list[tuple[int, RowPlan]], lens: Any) -> Control | None:
        """What is asked of the rows, as far as it is valid."""
        if not op.with_control and all(plan.action == "none" for _, plan in plans):
            return None
        control = Control(max(1, len(plans))).reset(len(plans))
        for i, (handle, plan) in enumerate(plans):
            record = self.oracle.records.get(handle)
            for bit in ("skip", "hold", "flush", "retracted"):
                if bit in plan.action:
                    control.flags[i] |= getattr(L, f"CONTROL_{bit.upper()}")
            length = 0 if record is None else record.output_len + int(lens[i])
            if plan.action == "finish":
                end = -1 if plan.back < 0 else max(0, length - plan.back)
                control.finish(i, plan.code, finished_len=end, match=plan.bits - 3)
            elif "visible" in plan.action and record is not None:
                control.visible_len[i] = self.valid_visible(record, length, plan)
        return control

    def valid_visible(self, record: Record, length: int, plan: RowPlan) -> int:
        visible = 0 if plan.bits == 0 else max(0, length - plan.back)
        behind = length - max(record.token_cursor, visible)
        if record.request.return_logprob:
            behind = max(behind, length - max(record.logprob_cursor, visible))
        limit = self.config.visible_limit if record.request.family_width else self.config.backlog_limit
        return visible if behind <= limit else -1


# --- Tests ----------------------------------------------------------------------------------------


@given(life=lives())
@settings(max_examples=LIVES)
def test_packer_equals_oracle(harness: Harness, life: Life) -> None:
    Play(harness, life.config, life.convey).play(life)


class Receiver(Play):
    """Joins what comes out and compares it with what went in, without asking the oracle."""

    def __init__(self, harness: Harness, config: PackerConfig, convey: bool) -> None:
        super().__init__(harness, config, convey)
        self.names: dict[int, str] = {}
        self.went_in: dict[str, list[tuple[int, int]]] = {}
        self.came_out: dict[str, list[int]] = {}
        self.came_out_bits: dict[str, list[int]] = {}
        self.finals: dict[int, int] = {}

    def admit(self, requests: list[Request], resumes: list[Any], oracle_resumes: list[Any]) -> list[int]:
        handles = super().admit(requests, resumes, oracle_resumes)
        for handle, request, resume in zip(handles, requests, resumes, strict=False):
            self.names[handle] = request.rid
            kept = 0 if resume is None else resume.output_len
            for joined in (self.went_in, self.came_out, self.came_out_bits):
                joined[request.rid] = joined.get(request.rid, [])[:kept]  # type: ignore[assignment]
        return handles

    def fed(self, handle: int, tokens: list[int], bits: list[int]) -> None:
        if handle in self.oracle.records:
            saturated = [min(max(token, INT32.min), INT32.max) for token in tokens]
            self.went_in[self.names[handle]] += list(zip(saturated, bits, strict=True))

    def received(self, rows: list[Row]) -> None:
        for row in rows:
            if "conveyed" in row.flags:
                continue
            name, request = self.names[row.handle], self.packer.slots.request(row.handle)
            tokens, bits = self.came_out[name], self.came_out_bits[name]
            assert row.handle not in self.finals, "the final row is the last"
            assert row.token_start == len(tokens)
            before = len(tokens)
            if "hidden token" not in row.flags:
                tokens += row.token_ids
            bits += row.logprobs
            assert len(tokens) == max(before, row.visible_len)
            assert tokens == [token for token, _ in self.went_in[name]][: len(tokens)]
            if request.return_logprob:
                assert row.logprob_start + len(row.logprobs) == len(bits)
                assert bits == [score for _, score in self.went_in[name]][: len(bits)]
                assert len(bits) >= len(tokens), "every batch returns logprobs"
            else:
                assert not bits
            if "final" in row.flags:
                self.finals[row.handle] = row.visible_len

    def abort_all(self) -> None:
        """Every request that is still open gets its final row."""
        while self.in_flight:
            self.take_in()
        width = self.config.batch_capacity
        handles = list(self.oracle.records)
        for start in range(0, len(handles), width):
            part = handles[start : start + width]
            control = Control(width).reset(len(part))
            for row in range(len(part)):
                control.finish(row)
            self.harness.poison(self.packer, POISON)
            pair = (
                self.packer.pack(np.array(part, np.int64), control=control),
                self.oracle.pack(part, control=control),
            )
            self.in_flight.append(pair)
            self.take_in()


@given(life=lives(st.just(EmitPolicy()), always_return_logprob=True))
@settings(max_examples=(LIVES + 1) // 2)
def test_default_policy_sends_everything_once(harness: Harness, life: Life) -> None:
    play = Receiver(harness, life.config, life.convey)
    play.play(life)
    play.abort_all()
    judged_here = [handle for handle, record in play.oracle.records.items() if not record.conveyed]
    assert set(judged_here) <= play.finals.keys(), "every request has its final row"
    for handle in judged_here:
        out = play.came_out[play.names[handle]]
        assert len(out) >= play.finals[handle], "nothing before the visible length is missing"
    event(f"{len(play.finals)} finals")
