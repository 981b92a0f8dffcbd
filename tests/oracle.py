"""Oracle: SPEC.md section 2 for one request at a time, in plain Python, obvious and slow.

A request is an object that keeps its whole output in a list; nothing is packed, wrapped round or
shared. It has the calls of `gpupack.Packer` and needs NumPy only. Inputs must be valid: the oracle
says what should happen, not what is wrong with a call. Frozen while the loop and the kernel are tuned.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpupack.core.config import PackerConfig
from gpupack.core.request import Request, Resume

# Written out here, not imported: a mistake in layout.py must show.
SKIP, HOLD, FLUSH, FINISH, RETRACTED = 1, 2, 4, 8, 16
CODES = ("none", "stop_token", "length", "invalid_token", "stop_string", "host")


@dataclass(frozen=True)
class Row:
    """A row as plain values; logprobs as bit patterns, so that NaN and -0.0 compare."""

    batch_index: int
    handle: int
    flags: frozenset[str]  # of final, early, conveyed, hidden token
    code: str
    visible_len: int
    match: int
    token_start: int
    logprob_start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[int, ...]
    families: tuple[int, ...] = ()  # words of the records of the same positions as the logprobs, joined
    spec: tuple[int, ...] = ()


@dataclass
class Run:
    """What a step brings of one request: tokens, bits of their logprobs, a record for each, lens if it verified."""

    tokens: list[int] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    records: list[list[int]] = field(default_factory=list)
    verified: bool = False
    block: int = 0
    cap: int | None = None


@dataclass
class Step:
    """What a step put out."""

    launch: int
    batch: int
    rows: list[Row] = field(default_factory=list)
    stale: int = 0
    late: int = 0
    held: int = 0

    @property
    def early(self) -> int:
        return sum("early" in row.flags for row in self.rows)

    @property
    def finished(self) -> int:
        return sum("final" in row.flags for row in self.rows)

    @property
    def conveyed(self) -> int:
        return sum("conveyed" in row.flags for row in self.rows)


@dataclass
class Record:
    """A request that is open."""

    request: Request
    judged: bool  # the packer looks for the finish
    conveyed: bool  # every run is passed on
    stop_ids: list[int]
    tokens: list[Any]  # the whole output; None where it was sent before a resume
    logprobs: list[Any]  # bit patterns, one for each token if asked for
    families: list[Any]  # records, one for each token if asked for
    spec: list[int]
    token_cursor: int = 0
    logprob_cursor: int = 0
    code: str = "none"
    match: int = 0
    finished_len: int | None = None
    final_sent: bool = False

    @property
    def output_len(self) -> int:
        return len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.code != "none"

    def snapshot(self) -> Record:
        return replace(
            copy(self),
            tokens=list(self.tokens),
            logprobs=list(self.logprobs),
            families=list(self.families),
            spec=list(self.spec),
        )


@dataclass(frozen=True)
class Asked:
    """What control asks of one row."""

    flags: int = 0
    visible_len: int = -1
    finished_len: int = -1
    code: int = 0
    match: int = 0


class OracleTicket:
    """A launched step, with every request as it stood before."""

    def __init__(self, oracle: Oracle, step: Step, before: dict[int, Record]) -> None:
        self._oracle = oracle
        self.launched = step
        self.before = before

    def wait(self) -> Step:
        return self._oracle._take_in(self)


class Oracle:
    """The calls of `gpupack.Packer`, request by request."""

    def __init__(self, config: PackerConfig, *, convey: bool = True) -> None:
        self.config = config
        self.policy = config.policy
        self.convey = convey
        self.records: dict[int, Record] = {}
        self.dropped_rows = 0
        self.in_flight: list[OracleTicket] = []
        self._launches = 0
        self._generations = [1] * config.capacity
        self._free = list(range(config.capacity))  # the next slot is the first; a freed one goes to the front

    # --- life of a handle -------------------------------------------------------------------------

    def admit(self, requests: list[Request], resume: list[Resume | None] | None = None) -> list[int]:
        handles = []
        for request, entry in zip(requests, resume or [None] * len(requests), strict=True):
            start = entry or Resume()
            sent_tokens = [None] * start.token_cursor
            sent_logprobs = [None] * min(start.logprob_cursor, start.output_len)
            judge = request.judge or self._judge(request)
            slot = self._free.pop(0)
            handle = self._generations[slot] * 2**32 + slot
            self.records[handle] = Record(
                request=request,
                judged=judge == "device",
                conveyed=judge != "device" and self.convey,
                stop_ids=self._stop_ids(request),
                tokens=sent_tokens + [int(token) for token in start.unsent_tokens],
                logprobs=sent_logprobs + [_bits(value) for value in start.unsent_logprobs],
                families=sent_logprobs + _records(start.unsent_families, request),
                spec=[int(count) for count in start.spec_counts] or [0] * self._spec_width(),
                token_cursor=start.token_cursor,
                logprob_cursor=start.logprob_cursor,
            )
            handles.append(handle)
        return handles

    def retire(self, handles: Any) -> None:
        for handle in _ints(handles):
            del self.records[handle]
            slot = handle % 2**32
            self._generations[slot] += 1
            if self._generations[slot] < 2**31 - 1:
                self._free.insert(0, slot)

    def retract(self, handle: int, *, output_len: int | None = None) -> Resume:
        """As `Packer.retract`: what no step in flight has sent yet, up to what the host committed."""
        record, counts = self.settled(handle), self.records[handle].spec
        self.retire([handle])
        end = record.output_len if output_len is None else output_len
        asked = record.request.return_logprob
        bits = record.logprobs[record.logprob_cursor : end] if asked else []
        records = record.families[record.logprob_cursor : end] if asked else []
        return Resume(
            output_len=end,
            token_cursor=record.token_cursor,
            logprob_cursor=record.logprob_cursor,
            unsent_tokens=np.array(record.tokens[record.token_cursor : end], np.int32),
            unsent_logprobs=np.array(bits, np.uint32).view(np.float32),
            unsent_families=np.array([word for words in records for word in words], np.int32),
            spec_counts=np.array(counts, np.int32),
        )

    def settled(self, handle: int) -> Record:
        """A request as it stands without the steps that are in flight."""
        for ticket in self.in_flight:
            if handle in ticket.before:
                return ticket.before[handle]
        return self.records[handle]

    # --- steps ------------------------------------------------------------------------------------

    def step(
        self, handles: Any, token_ids: Any, *, control: Any = None, return_logprob: bool = True, **inputs: Any
    ) -> OracleTicket:
        runs = self._runs(handles, token_ids, **inputs)
        return self._launch(handles, runs, control, packing=True, return_logprob=return_logprob)

    def append(self, handles: Any, token_ids: Any, **inputs: Any) -> OracleTicket:
        return self._launch(
            handles, self._runs(handles, token_ids, **inputs), None, packing=False, return_logprob=False
        )

    def pack(self, handles: Any, *, control: Any = None, return_logprob: bool = True) -> OracleTicket:
        runs = [Run() for _ in _ints(handles)]
        return self._launch(handles, runs, control, packing=True, return_logprob=return_logprob)

    def _runs(
        self, handles: Any, token_ids: Any, accept_lens: Any = None, logprobs: Any = None, top_logprobs_val: Any = None,
        top_logprobs_idx: Any = None, token_ids_logprobs_val: Any = None, block_accept_lens: Any = None,
        cap_lens: Any = None,
    ) -> list[Run]:  # fmt: skip
        """What the step brings of each row."""
        runs = []
        for i, handle in enumerate(_ints(handles)):
            if handle not in self.records:  # what stands in such a row is never read
                runs.append(Run())
                continue
            request = self.records[handle].request
            accept = 1 if accept_lens is None else int(accept_lens[i])
            tokens = [int(token) for token in np.ravel(token_ids[i])[:accept]]
            bits = [] if logprobs is None else [_bits(value) for value in np.ravel(logprobs[i])[:accept]]
            records: list[list[int]] = [[] for _ in range(accept)]
            if request.top_logprobs_num:
                values, ids = np.atleast_2d(top_logprobs_val[i]), np.atleast_2d(top_logprobs_idx[i])
                for p in range(accept):
                    records[p] += [_signed_bits(value) for value in values[p, : request.top_logprobs_num]]
                    records[p] += [int(index) for index in ids[p, : request.top_logprobs_num]]
            if len(request.token_ids_logprob):
                values = np.atleast_2d(token_ids_logprobs_val[i])
                for p in range(accept):
                    records[p] += [_signed_bits(value) for value in values[p, : len(request.token_ids_logprob)]]
            run = Run(tokens, bits, records, verified=self.config.speculative and accept_lens is not None)
            run.block = 0 if block_accept_lens is None else int(block_accept_lens[i])
            run.cap = None if cap_lens is None else int(cap_lens[i])
            runs.append(run)
        return runs

    def _launch(self, handles: Any, runs: Any, control: Any, *, packing: bool, return_logprob: bool) -> OracleTicket:
        numbers = _ints(handles)
        before = {handle: self.records[handle].snapshot() for handle in numbers if handle in self.records}
        self._launches += 1
        step = Step(launch=self._launches, batch=len(numbers))
        for index, handle in enumerate(numbers):
            if handle == -1:
                continue
            if handle not in self.records:
                step.stale += 1
                continue
            row = self._one(step, index, handle, runs[index], _asked(control, index), packing, return_logprob)
            if row is not None:
                step.rows.append(row)
        ticket = OracleTicket(self, step, before)
        self.in_flight.append(ticket)
        return ticket

    def _take_in(self, ticket: OracleTicket) -> Step:
        assert self.in_flight.pop(0) is ticket
        step = ticket.launched
        kept = [row for row in step.rows if row.handle in self.records]
        self.dropped_rows += len(step.rows) - len(kept)
        return replace(step, rows=kept)

    # --- one request in one step ------------------------------------------------------------------

    def _one(
        self, step: Step, index: int, handle: int, run: Run, asked: Asked, packing: bool, return_logprob: bool
    ) -> Row | None:
        record = self.records[handle]
        wants_logprobs = record.request.return_logprob
        wants_families = record.request.family_width > 0
        if asked.flags & SKIP:
            return None
        if record.conveyed:
            raw = [0] * self._spec_width()
            if run.verified:
                raw[2], raw[3] = run.block, run.cap or 0
            return Row(
                index, handle, frozenset({"conveyed"}), "none", len(run.tokens), 0, 0, 0,
                tuple(map(_int32, run.tokens)), tuple(run.bits) if wants_logprobs else (),
                _joined(run.records) if wants_families else (), tuple(raw),
            )  # fmt: skip
        if record.final_sent:
            step.late += len(run.tokens) > 0
            return None

        if not record.finished:
            self._judge_run(record, run.tokens, asked)
            record.tokens += [_int32(token) for token in run.tokens]
            if wants_logprobs:
                record.logprobs += run.bits
                record.families += run.records
            self._count(record, run)

        # The visible length: where it ended, or what the host lets be seen of it.
        if record.finished:
            assert record.finished_len is not None
            visible = record.finished_len
        elif asked.visible_len >= 0:
            visible = min(record.output_len, asked.visible_len)
        else:
            visible = record.output_len

        # Would the backlog pass its limit?
        over = record.output_len - record.token_cursor > self.config.backlog_limit
        if wants_logprobs and record.output_len - record.logprob_cursor > self.config.backlog_limit:
            over = True
        if wants_families and record.output_len - record.logprob_cursor > self.config.family_limit:
            over = True

        if packing and record.finished:
            sends = True
        elif packing:
            sends = self._due(record, visible) or bool(asked.flags & FLUSH and visible > record.token_cursor)
            if sends and asked.flags & HOLD and (record.request.stream or self.policy.hold_forced):
                sends = False
                step.held += 1
        else:
            sends = False
        early = over and not sends
        if not sends and not early:
            return None

        flags = {name for name, on in (("final", record.finished), ("early", early)) if on}
        token_start, logprob_start = record.token_cursor, record.logprob_cursor
        tokens = record.tokens[token_start:visible]
        record.token_cursor = max(token_start, visible)
        scores: list[int] = []
        families: list[list[int]] = []
        if wants_logprobs and (return_logprob or over):
            retracted = asked.flags & RETRACTED and self.policy.retracted_logprobs
            end = visible if retracted else max(visible, 1)
            if not self.policy.logprob_before_token:
                end = min(end, record.output_len)
            scores = record.logprobs[logprob_start:end]
            families = record.families[logprob_start:end]
            record.logprob_cursor = max(logprob_start, end)
            if retracted and record.output_len == 0:
                record.logprob_cursor = 0
            if scores and visible == 0 and token_start == 0:  # the id of that logprob, which is not output
                flags.add("hidden token")
                tokens = record.tokens[:1]
        if record.finished:
            record.final_sent = True
        return Row(
            index, handle, frozenset(flags), record.code, visible, record.match, token_start, logprob_start,
            tuple(tokens), tuple(scores), _joined(families) if wants_families else (), tuple(record.spec),
        )  # fmt: skip

    def _spec_width(self) -> int:
        return 4 + 2 * (self.config.max_accept + 1) if self.config.speculative else 0

    def _count(self, record: Record, run: Run) -> None:
        """The counters of speculative decoding: a verify step that accepted something."""
        if not run.verified or not run.tokens:
            return
        drafts, buckets = len(run.tokens) - 1, self.config.max_accept + 1
        record.spec[0] += 1
        record.spec[1] += drafts
        record.spec[2] += run.block
        record.spec[4 + drafts] += 1
        if run.cap is not None:
            record.spec[3] += run.cap
            record.spec[4 + buckets + run.cap] += 1

    def _due(self, record: Record, visible: int) -> bool:
        unsent = visible - record.token_cursor
        first = record.token_cursor == 0 and unsent > 0
        if unsent <= 0 and not self.policy.send_empty:
            return False
        if record.request.stream:
            n = record.request.stream_interval or self.config.stream_interval
            if n == 1:
                return True
            if self.policy.stream_rule == "modulo":
                return visible % n == 1
            return unsent >= n or first
        if self.policy.first_token_flush and first:
            return True
        if self.policy.force_rule == "modulo":
            return visible % self.config.force_interval == 0
        return unsent >= self.config.force_interval

    def _judge_run(self, record: Record, run: list[int], asked: Asked) -> None:
        """Find out whether, why and where the request ends with this run."""
        if record.judged:
            self._scan(record, run)
        if asked.flags & FINISH:
            cut = record.finished_len
            record.code, record.match = CODES[asked.code], asked.match
            if asked.finished_len >= 0:
                record.finished_len = asked.finished_len
            else:
                record.finished_len = record.output_len + len(run) if cut is None else cut

    def _scan(self, record: Record, run: list[int]) -> None:
        cap = record.request.max_new_tokens
        places = range(record.output_len, record.output_len + len(run))  # of the run in the output
        seen = [(place, token) for place, token in zip(places, run, strict=True) if place < cap]
        invalid = [(place, token) for place, token in seen if not 0 <= token < self.config.vocab_size]
        stops = [(place, token) for place, token in seen if token in record.stop_ids]
        if invalid:
            place, token = invalid[0]
            record.code, record.match, record.finished_len = "invalid_token", _int32(token), place
        elif stops:
            place, token = stops[0]
            record.code, record.match, record.finished_len = "stop_token", token, place + 1
        elif run and record.output_len + len(run) >= cap:
            record.code, record.match, record.finished_len = "length", cap, cap

    def _stop_ids(self, request: Request) -> list[int]:
        if request.ignore_eos:
            return []
        return sorted({*self.config.eos_token_ids, *request.stop_token_ids})

    def _judge(self, request: Request) -> str:
        on_host = bool(request.stop) or len(self._stop_ids(request)) > 6
        return "host" if on_host else "device"


def _ints(handles: Any) -> list[int]:
    return [int(handle) for handle in handles]


def _int32(token: int) -> int:
    """A token id that is too wide for 32 bits becomes the widest that is not."""
    return min(max(token, -(2**31)), 2**31 - 1)


def _signed_bits(value: Any) -> int:
    return int(np.float32(value).view(np.int32))


def _joined(records: list[list[int]]) -> tuple[int, ...]:
    return tuple(word for record in records for word in record)


def _records(words: Any, request: Request) -> list[list[int]]:
    width = request.family_width
    return [[int(word) for word in words[i : i + width]] for i in range(0, len(words), width)] if width else []


def _bits(value: Any) -> int:
    """Bit pattern of a float32."""
    return int(np.asarray(value, np.float32).view(np.uint32))


def _asked(control: Any, index: int) -> Asked:
    if control is None:
        return Asked()
    return Asked(
        flags=int(control.flags[index]),
        visible_len=int(control.visible_len[index]),
        finished_len=int(control.finished_len[index]),
        code=int(control.finish_code[index]),
        match=int(control.match[index]),
    )
