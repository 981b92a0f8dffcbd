"""SPEC.md section 4, the rows that show at the packer: worked by hand, run on the Packer and on the Oracle.

What stands on the wire (decode ids, read offsets, texts, opening records, messages) is tested with the
streamer. Stop strings and holds are decisions of the host: here they come as control.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from oracle import Oracle, Row
from strategies import ODD_BITS, PRESETS
from test_lives import rows_of

from gpupack.core import layout as L
from gpupack.core.config import EmitPolicy, PackerConfig
from gpupack.core.request import Request, Resume
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer

ALL, DEFAULT = tuple(PRESETS), ("default",)
OLD, NEW, SGLANG = ("sglang_0_5_16",), ("sglang_0_5_23",), ("sglang_0_5_16", "sglang_0_5_23")

EOS, STOP, VOCAB = 2, 9, 1000
TOP = 2**31 - 1


def ids(start: int, stop: int) -> list[int]:
    """Token ids that name their place in the output."""
    return [100 + place for place in range(start, stop)]


def score(place: int) -> float:
    """A logprob that names its place in the output."""
    return -(place + 1) / 8


def bits(*values: float) -> tuple[int, ...]:
    return tuple(np.array(values, np.float32).view(np.uint32).tolist())


# --- What is done, and what is to come of it ------------------------------------------------------


@dataclass
class Do:
    """One step of one request; without `run`, a pack."""

    run: list[int] | None = None
    flags: int = 0
    visible_len: int = -1
    finish: dict[str, int] | None = None
    append: bool = False
    return_logprob: bool = True
    scores: list[float] | None = None


@dataclass
class Sent:
    """The row that a step must give."""

    tokens: list[int]
    visible_len: int
    final: str | None = None
    match: int = 0
    scores: list[float] | None = None
    early: bool = False


NOTHING = None


@dataclass
class Case:
    name: str
    steps: list[Do]
    rows: list[Sent | None]
    policies: tuple[str, ...] = ALL
    request: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def lengths(*ends: int, **last: Any) -> list[Do]:
    """A step for each output length; `last` changes the last one."""
    steps = [Do(ids(start, end)) for start, end in zip((0, *ends), ends, strict=False)]
    return [*steps[:-1], Do(steps[-1].run, **last)]


def at(ends: list[int], sends: dict[int, tuple[int, int]], **final: Any) -> list[Sent | None]:
    """Rows at some of the output lengths: length -> the delta's begin and end; `final` describes the last."""
    rows: list[Sent | None] = [Sent(ids(*sends[end]), end) if end in sends else NOTHING for end in ends]
    if final:
        rows[-1] = Sent(ids(*sends[ends[-1]]), ends[-1], **final)
    return rows


def word(begin: int, text: str) -> list[int]:
    """A text, one token a letter, that stands at `begin` of the output."""
    return ids(begin, begin + len(text))


END_HERE = {"code": L.FINISH_HOST}
ENGINE = {"judge": "engine"}
ONE_TO_TEN, EIGHTS, SEVENS = list(range(1, 11)), [1, 4, 8, 12, 16, 20], list(range(1, 407, 7))
ENDED = {"final": "length", "match": 10}

CASES = [
    Case(
        "stream, n=4, lengths 1,2,...,10(fin)",
        lengths(*ONE_TO_TEN),
        at(ONE_TO_TEN, {1: (0, 1), 5: (1, 5), 9: (5, 9), 10: (9, 10)}, **ENDED),
        request={"stream_interval": 4, "max_new_tokens": 10},
    ),
    Case(
        "stream, n=4, speculative lengths, 0.5.16",
        lengths(*EIGHTS),
        at(EIGHTS, {1: (0, 1), 20: (1, 20)}, final="length", match=20),
        policies=OLD,
        request={"stream_interval": 4, "max_new_tokens": 20},
    ),
    Case(
        "stream, n=4, speculative lengths",
        lengths(*EIGHTS),
        at(EIGHTS, {1: (0, 1), 8: (1, 8), 12: (8, 12), 16: (12, 16), 20: (16, 20)}, final="length", match=20),
        policies=DEFAULT + NEW,
        request={"stream_interval": 4, "max_new_tokens": 20},
    ),
    Case(
        "stream, n=4, lengths 3,6,9,12, 0.5.16",
        lengths(3, 6, 9, 12),
        at([3, 6, 9, 12], {9: (0, 9)}),
        policies=OLD,
        request={"stream_interval": 4},
    ),
    Case(
        "stream, n=4, lengths 3,6,9,12",
        lengths(3, 6, 9, 12),
        at([3, 6, 9, 12], {3: (0, 3), 9: (3, 9)}),
        policies=DEFAULT + NEW,
        request={"stream_interval": 4},
    ),
    Case(
        "non-stream, 50, one by one to 120(fin)",
        lengths(*range(1, 121)),
        at(list(range(1, 121)), {50: (0, 50), 100: (50, 100), 120: (100, 120)}, final="length", match=120),
        request={"stream": False, "max_new_tokens": 120},
    ),
    Case(
        "non-stream, 50, lengths 1,8,15,..., presets",
        lengths(*SEVENS),
        at(SEVENS, {50: (0, 50), 400: (50, 400)}),
        policies=SGLANG,
        request={"stream": False},
        config={"window": 512},
    ),
    Case(
        "non-stream, 50, lengths 1,8,15,...",
        lengths(*SEVENS[:16]),
        at(SEVENS[:16], {50: (0, 50), 106: (50, 106)}),
        policies=DEFAULT,
        request={"stream": False},
    ),
    Case(
        "max_new_tokens=1",
        lengths(1),
        [Sent(ids(0, 1), 1, final="length", match=1)],
        request={"max_new_tokens": 1},
    ),
    Case(
        "all sent, then abort",
        [*lengths(1, 2), Do(finish=END_HERE)],
        [*at([1, 2], {1: (0, 1), 2: (1, 2)}), Sent([], 2, final="host")],
    ),
    Case(
        "abort while queued",
        [Do(finish=END_HERE)],
        [Sent([], 0, final="host")],
    ),
    Case(
        "finishes at step k, seen again at k+1 with one more token",
        lengths(1, 2, 3),
        [Sent(ids(0, 1), 1), Sent(ids(1, 2), 2, final="length", match=2), NOTHING],
        request={"max_new_tokens": 2},
    ),
    Case(
        "stop WXYZ, texts ab, W, X, YZ(fin)",
        [
            Do(word(0, "ab")),
            Do(word(2, "W"), L.CONTROL_HOLD),
            Do(word(3, "X"), L.CONTROL_HOLD),
            Do(word(4, "Y"), L.CONTROL_HOLD, finish={"code": L.FINISH_STOP_STRING}),
        ],
        [Sent(ids(0, 2), 2), NOTHING, NOTHING, Sent(ids(2, 5), 5, final="stop_string")],
        request=ENGINE,
    ),
    Case(
        "stop WXYZ, texts ab, W, q",
        [Do(word(0, "ab")), Do(word(2, "W"), L.CONTROL_HOLD), Do(word(3, "q"))],
        [Sent(ids(0, 2), 2), NOTHING, Sent(ids(2, 4), 4)],
        request=ENGINE,
    ),
    Case(
        "stop TRE!!, texts UNO, DUE, TRE, then end of sequence",
        [Do(ids(0, 1)), Do(ids(1, 2)), Do(ids(2, 3), L.CONTROL_HOLD), Do([EOS])],
        [Sent(ids(0, 1), 1), Sent(ids(1, 2), 2), NOTHING, Sent([102, EOS], 4, final="stop_token", match=EOS)],
    ),
    Case(
        "one step accepts [5,6,7,8,9], stop string complete at 7, [3,4] sent before",
        [Do([3, 4]), Do([5, 6, 7, 8, 9], finish={"code": L.FINISH_STOP_STRING, "finished_len": 5})],
        [
            Sent([3, 4], 2, scores=[score(0), score(1)]),
            Sent([5, 6, 7], 5, final="stop_string", scores=[score(2), score(3), score(4)]),
        ],
        request={**ENGINE, "return_logprob": True},
    ),
    Case(
        "run [7,8,STOP,9,9,9], cap 4",
        [Do([7, 8, STOP, 10, 10, 10])],
        [Sent([7, 8, STOP], 3, final="stop_token", match=STOP)],
        request={"max_new_tokens": 4, "stop_token_ids": [STOP]},
    ),
    Case(
        "run [7,8,9,9,STOP], cap 4",
        [Do([7, 8, 10, 10, STOP])],
        [Sent([7, 8, 10, 10], 4, final="length", match=4)],
        request={"max_new_tokens": 4, "stop_token_ids": [STOP]},
    ),
    Case(
        "stop string and end-of-sequence in one run",
        [Do([7, 8, EOS], finish={"code": L.FINISH_STOP_STRING, "finished_len": 2})],
        [Sent([7, 8], 2, final="stop_string")],
    ),
    Case(
        "a row at length 0, then a token with its logprob, presets",
        [Do(), Do([7]), Do([8])],
        [Sent([], 0, scores=[]), Sent([7], 1, scores=[]), Sent([8], 2, scores=[score(1)])],
        policies=SGLANG,
        request={"return_logprob": True},
    ),
    Case(
        "a row at length 0, then a token with its logprob",
        [Do(), Do([7]), Do([8])],
        [NOTHING, Sent([7], 1, scores=[score(0)]), Sent([8], 2, scores=[score(1)])],
        policies=DEFAULT,
        request={"return_logprob": True},
    ),
    Case(
        "run [5,bad,7], bad = vocab",
        [Do([5, VOCAB, 7])],
        [Sent([5], 1, final="invalid_token", match=VOCAB)],
    ),
    Case(
        "run [5,bad,7], bad = -1",
        [Do([5, -1, 7])],
        [Sent([5], 1, final="invalid_token", match=-1)],
    ),
    Case(
        "run [5,bad,7], bad does not fit 32 bits",
        [Do([5, 2**40, 7])],
        [Sent([5], 1, final="invalid_token", match=TOP)],
    ),
    Case(
        "abort asked for in the step that samples a token, token accepted before",
        [Do([7]), Do([8], finish=END_HERE)],
        [Sent([7], 1), Sent([7 + 1], 2, final="host")],
    ),
    Case(
        "abort asked for in the step that samples a token, token accepted after",
        [Do([7]), Do(finish=END_HERE), Do([8])],
        [Sent([7], 1), Sent([], 1, final="host"), NOTHING],
    ),
    Case(
        "abort asked for in the step that samples a token, cut before it",
        [Do([7]), Do([8], finish={"code": L.FINISH_HOST, "finished_len": 1})],
        [Sent([7], 1), Sent([], 1, final="host")],
    ),
    Case(
        "max_new_tokens=0, return_logprob",
        [Do([7])],
        [Sent([], 0, final="length", match=0, scores=[score(0)])],
        request={"max_new_tokens": 0, "return_logprob": True},
    ),
    # Not rows of the table, but what sections 2 and 3 say.
    Case(
        "finish order: an invalid id behind a stop id, which is inside the output",
        [Do([7, STOP, -1])],
        [Sent([7, STOP], 2, final="invalid_token", match=-1)],
        request={"stop_token_ids": [STOP]},
    ),
    Case(
        "finish order: an invalid id beyond the cap is not looked at",
        [Do([7, 8, -1])],
        [Sent([7, 8], 2, final="length", match=2)],
        request={"max_new_tokens": 2},
    ),
    Case(
        "ignore_eos switches off both",
        [Do([EOS]), Do([STOP])],
        [Sent([EOS], 1), Sent([STOP], 2)],
        request={"ignore_eos": True, "stop_token_ids": [STOP]},
    ),
    Case(
        "a visible length below the cursor gives an empty delta",
        [Do([7, 8, 10]), Do([11], finish={"code": L.FINISH_STOP_STRING, "finished_len": 2})],
        [Sent([7, 8, 10], 3), Sent([], 2, final="stop_string")],
    ),
    Case(
        "a token id beyond 32 bits becomes the widest: from the input, and through the ring",
        [Do([2**40]), Do([-(2**40)]), Do([2**32 + 1]), Do([2**31])],
        [Sent([TOP], 1), NOTHING, NOTHING, Sent([-(2**31), TOP, TOP], 4)],
        policies=DEFAULT + NEW,
        request={**ENGINE, "stream_interval": 3},
    ),
    Case(
        "visible length: the rest waits",
        [Do(ids(0, 3), visible_len=2), Do(ids(3, 4)), Do(ids(4, 5), visible_len=1)],
        [Sent(ids(0, 2), 2), Sent(ids(2, 4), 4), NOTHING],
        policies=DEFAULT,
    ),
    Case(
        "visible length counts for the due rule, 0.5.16",
        [Do(ids(0, 5), visible_len=4), Do(ids(5, 6), visible_len=5), Do(visible_len=6)],
        [NOTHING, Sent(ids(0, 5), 5), NOTHING],
        policies=OLD,
        request={"stream_interval": 4},
    ),
    Case(
        "skipped: its token is not output",
        [Do(ids(0, 1)), Do([77], L.CONTROL_SKIP), Do(ids(1, 2))],
        [Sent(ids(0, 1), 1), NOTHING, Sent(ids(1, 2), 2)],
    ),
    Case(
        "flush: what is unsent goes, due or not; with nothing unsent nothing does",
        [Do(ids(0, 1)), Do(ids(1, 2)), Do(flags=L.CONTROL_FLUSH), Do(flags=L.CONTROL_FLUSH)],
        [Sent(ids(0, 1), 1), NOTHING, Sent(ids(1, 2), 2), NOTHING],
        request={"stream_interval": 4},
        policies=DEFAULT + NEW,
    ),
    Case(
        "forced sends: presets do not respect the hold",
        [Do(ids(0, 2), L.CONTROL_HOLD)],
        [Sent(ids(0, 2), 2)],
        policies=SGLANG,
        request={"stream": False},
        config={"force_interval": 2},
    ),
    Case(
        "forced sends: the default respects the hold",
        [Do(ids(0, 2), L.CONTROL_HOLD)],
        [NOTHING],
        policies=DEFAULT,
        request={"stream": False},
        config={"force_interval": 2},
    ),
    Case(
        "presets send an empty row at length 0",
        [Do(), Do()],
        [Sent([], 0), Sent([], 0)],
        policies=SGLANG,
        request={"stream": False},
    ),
    Case(
        "logprobs wait for a batch that returns them",
        [Do([7], return_logprob=False), Do([8], return_logprob=False), Do([10])],
        [
            Sent([7], 1, scores=[]),
            Sent([8], 2, scores=[]),
            Sent([10], 3, scores=[score(0), score(1), score(2)]),
        ],
        request={"return_logprob": True},
    ),
    Case(
        "a backlog that would pass its limit goes early, held or not",
        [Do(ids(0, 1), L.CONTROL_HOLD), *[Do(ids(i, i + 1), L.CONTROL_HOLD) for i in range(1, 4)]],
        [NOTHING, NOTHING, NOTHING, Sent(ids(0, 4), 4, early=True)],
        config={"window": 4, "max_in_flight": 1, "max_accept": 1},
    ),
    Case(
        "an early row carries its logprobs, asked for by the batch or not",
        [*[Do(ids(i, i + 1), return_logprob=False) for i in range(4)], Do(ids(4, 5), return_logprob=False)],
        [
            *[Sent(ids(i, i + 1), i + 1, scores=[]) for i in range(3)],
            Sent(ids(3, 4), 4, scores=[score(i) for i in range(4)]),  # it goes anyway, so it is not early
            Sent(ids(4, 5), 5, scores=[]),
        ],
        request={"return_logprob": True},
        config={"window": 4, "max_in_flight": 1, "max_accept": 1},
    ),
    Case(
        "append: only takes in; a finish found there goes with the next pack",
        [Do(ids(0, 2), append=True), Do([EOS], append=True), Do([77], append=True), Do(), Do([78])],
        [NOTHING, NOTHING, NOTHING, Sent([100, 101, EOS], 3, final="stop_token", match=EOS), NOTHING],
    ),
]


# --- Running them ---------------------------------------------------------------------------------


class Bench:
    """A Packer or an Oracle; rows come back as the oracle's."""

    def __init__(self, side: str, policy: str | EmitPolicy, **config: Any) -> None:
        sizes = {"vocab_size": VOCAB, "eos_token_ids": (EOS,), "capacity": 8, "window": 128, "max_accept": 8}
        rules = PRESETS[policy] if isinstance(policy, str) else policy
        self.config = PackerConfig(policy=rules, **{**sizes, **config})
        self.engine: Any = {"packer": Packer, "oracle": Oracle}[side](self.config, convey=False)

    def admit(self, *requests: Request, resume: list[Resume | None] | None = None) -> list[int]:
        return [int(handle) for handle in self.engine.admit(list(requests), resume)]

    @staticmethod
    def rows(ticket: Any) -> list[Row]:
        taken_in = ticket.wait()
        if isinstance(taken_in.rows, list):
            return taken_in.rows
        rows = rows_of(taken_in)
        taken_in.release()
        return rows

    def step(
        self, handles: list[int], runs: list[list[int]], scores: Any = None, wait: bool = True, **more: Any
    ) -> Any:
        width = max(1, *map(len, runs))
        tokens = np.full((len(runs), width), -7, np.int64)  # what stands behind a run is no token
        logprobs = np.full((len(runs), width + 1), np.nan, np.float32)
        for i, run in enumerate(runs):
            tokens[i, : len(run)] = run
            logprobs[i, : len(run)] = 0 if scores is None else scores[i]
        lens = np.array([len(run) for run in runs], np.int32)
        ticket = self.engine.step(
            np.array(handles, np.int64), tokens, accept_lens=lens, logprobs=logprobs, **more
        )  # fmt: skip
        return self.rows(ticket) if wait else ticket

    def do(self, handle: int, do: Do, length: int) -> list[Row]:
        control = Control(1).reset(1)
        control.flags[0], control.visible_len[0] = do.flags, do.visible_len
        if do.finish is not None:
            control.finish(0, do.finish["code"], finished_len=do.finish.get("finished_len", -1))
        handles = np.array([handle], np.int64)
        if do.run is None:
            return self.rows(self.engine.pack(handles, control=control, return_logprob=do.return_logprob))
        scores = do.scores or [score(length + i) for i in range(len(do.run))]
        if do.append:
            lens = np.array([len(do.run)], np.int64)
            tokens, logprobs = np.array([do.run], np.int64), np.array([scores], np.float32)
            return self.rows(self.engine.append(handles, tokens, accept_lens=lens, logprobs=logprobs))
        return self.step([handle], [do.run], [scores], control=control, return_logprob=do.return_logprob)


@pytest.fixture(params=["packer", "oracle"])
def side(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    ("case", "policy"),
    [pytest.param(case, policy, id=f"{case.name}-{policy}") for case in CASES for policy in case.policies],
)
def test_case(side: str, case: Case, policy: str) -> None:
    bench = Bench(side, policy, **case.config)
    request = Request("r", **case.request)
    (handle,) = bench.admit(request)
    assert len(case.steps) == len(case.rows)
    length = sent = 0
    for number, (do, wanted) in enumerate(zip(case.steps, case.rows, strict=True)):
        got = bench.do(handle, do, length)
        length += len(do.run or []) if not do.flags & L.CONTROL_SKIP else 0
        if wanted is None:
            assert got == [], f"step {number}"
            continue
        (row,) = got
        flags = {name for name, on in (("final", wanted.final), ("early", wanted.early)) if on}
        hidden = request.max_new_tokens == 0 and request.return_logprob  # its one token only gives the logprob an id
        flags |= {"hidden token"} if hidden else set()
        output = [] if hidden else list(row.token_ids)
        assert (output, row.visible_len) == (wanted.tokens, wanted.visible_len), f"step {number}"
        assert (row.flags, row.code, row.match) == (flags, wanted.final or "none", wanted.match), f"step {number}"
        assert (row.handle, row.batch_index, row.token_start) == (handle, 0, sent)
        sent += len(row.token_ids)
        if wanted.scores is not None:
            assert row.logprobs == bits(*wanted.scores), f"step {number}"
        elif not request.return_logprob:
            assert row.logprobs == ()


@pytest.mark.parametrize("policy", ALL)
def test_three_requests_none_due(side: str, policy: str) -> None:
    bench = Bench(side, policy)
    handles = bench.admit(*[Request(f"r{i}", stream_interval=4) for i in range(3)])
    assert len(bench.step(handles, [[5], [6], [7]])) == 3
    assert bench.step(handles, [[5], [6], [7]]) == []


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("in_flight", [False, True], ids=["at once", "with a step in flight"])
def test_retraction_that_keeps_the_output(side: str, policy: str, interval: int, in_flight: bool) -> None:
    bench = Bench(side, policy)
    request = Request("r", stream_interval=interval, return_logprob=True)
    (handle,) = bench.admit(request)
    rows = []
    for place in range(7):
        rows += bench.step([handle], [ids(place, place + 1)], [[score(place)]])
    late = bench.step([handle], [[77]], [[-9.0]], wait=False) if in_flight else None
    resume = bench.engine.retract(handle, output_len=7)
    assert (resume.output_len, resume.token_cursor, resume.logprob_cursor) == (
        (7, 7, 7) if interval == 1 else (7, 5, 5)
    )
    if late is not None:
        assert bench.rows(late) == []
        assert bench.engine.dropped_rows == (interval == 1)
    (again,) = bench.admit(request, resume=[resume])
    assert again != handle
    for place in range(7, 12):
        rows += bench.step([again], [ids(place, place + 1)], [[score(place)]])
    control = Control(1).reset(1)
    control.finish(0)
    rows += bench.rows(bench.engine.pack(np.array([again]), control=control))
    assert [token for row in rows for token in row.token_ids] == ids(0, 12)
    assert [score for row in rows for score in row.logprobs] == list(bits(*map(score, range(12))))
    assert [row.visible_len for row in rows] == ([*range(1, 13), 12] if interval == 1 else [1, 5, 9, 12])


def test_restart_that_drops_the_output(side: str) -> None:
    """3 of ABCDE sent, then vwxyz; that the row says `restarted` is the streamer's part."""
    bench = Bench(side, "default")
    request = Request("r", stream_interval=3, return_logprob=True)
    (handle,) = bench.admit(request)
    (row,) = bench.step([handle], [ids(0, 3)], [[-1.0, -2.0, -3.0]])
    assert list(row.token_ids) == ids(0, 3)
    assert bench.step([handle], [ids(3, 5)], [[-4.0, -5.0]]) == []
    resume = bench.engine.retract(handle).dropped()
    assert (resume.output_len, resume.token_cursor, resume.logprob_cursor) == (0, 0, 0)
    (again,) = bench.admit(request, resume=[resume])
    (row,) = bench.step([again], [[20, 21, 22, 23, 24]], [[-0.5, -0.25, -0.125, -1.5, -2.5]])
    assert (row.token_ids, row.token_start, row.visible_len) == ((20, 21, 22, 23, 24), 0, 5)
    assert row.logprobs == bits(-0.5, -0.25, -0.125, -1.5, -2.5)


def test_late_step_for_an_old_generation(side: str) -> None:
    """Slot 4 generation 7 ended, slot 4 given to generation 8, a late step for generation 7 arrives."""
    bench = Bench(side, "default")
    handles = bench.admit(*[Request(f"r{i}") for i in range(5)])
    old = handles[4]
    while old >> 32 < 7:
        bench.engine.retire(np.array([old]))
        (old,) = bench.admit(Request("old"))
    assert old == (7 << 32) | 4
    bench.engine.retire(np.array([old]))
    (new,) = bench.admit(Request("new", return_logprob=True))
    assert new == (8 << 32) | 4
    assert [list(row.token_ids) for row in bench.step([new], [[5]], [[-1.0]])] == [[5]]
    taken_in = bench.step([old], [[66]], wait=False).wait()
    assert (taken_in.stale if side == "oracle" else taken_in.header(L.H_STALE)) == 1
    assert (len(taken_in.rows) if side == "oracle" else taken_in.rows) == 0
    (row,) = bench.step([new], [[6]], [[-2.0]])
    assert (row.handle, row.token_ids, row.token_start, row.logprobs) == (new, (6,), 1, bits(-2.0))


@pytest.mark.parametrize(
    ("policy", "rows", "indptr"),
    [("default", [0, 1, 3], [0, 3, 4, 6]), *[(name, [0, 1, 2, 3], [0, 3, 4, 4, 6]) for name in SGLANG]],
)
def test_accepts_and_strides(side: str, policy: str, rows: list[int], indptr: list[int]) -> None:
    """accepts [3,1,0,2], token stride 4, logprob stride 5, n=1."""
    bench = Bench(side, policy, max_accept=4)
    handles = bench.admit(*[Request(f"r{i}", return_logprob=True) for i in range(4)])
    tokens = np.arange(10, 26, dtype=np.int32).reshape(4, 4)
    scores = -np.arange(10, 30, dtype=np.float32).reshape(4, 5)
    ticket = bench.engine.step(
        np.array(handles), tokens, accept_lens=np.array([3, 1, 0, 2], np.int32), logprobs=scores
    )  # fmt: skip
    got = bench.rows(ticket)
    assert [row.batch_index for row in got] == rows
    assert np.cumsum([0] + [len(row.token_ids) for row in got]).tolist() == indptr
    assert np.cumsum([0] + [len(row.logprobs) for row in got]).tolist() == indptr
    assert [token for row in got for token in row.token_ids] == [10, 11, 12, 14, 22, 23]
    assert [score for row in got for score in row.logprobs] == list(bits(-10, -11, -12, -15, -25, -26))


@pytest.mark.parametrize("bad", [VOCAB, -1])
def test_invalid_id_changes_no_other_row(side: str, bad: int) -> None:
    alone = Bench(side, "default")
    left, right = alone.admit(Request("left"), Request("right"))
    expected = alone.step([left, right], [[3, 4], [6, 7]])
    bench = Bench(side, "default")
    left, right, middle = bench.admit(Request("left"), Request("right"), Request("middle"))
    first, hit, last = bench.step([left, middle, right], [[3, 4], [5, bad, 7], [6, 7]])
    assert (hit.handle, hit.token_ids, hit.code, hit.match) == (middle, (5,), "invalid_token", bad)
    assert [(row.handle, row.token_ids, row.visible_len, row.code) for row in (first, last)] == [
        (row.handle, row.token_ids, row.visible_len, row.code) for row in expected
    ]


@pytest.mark.parametrize("interval", [1, 3], ids=["from the input", "through the ring"])
def test_logprobs_bit_for_bit(side: str, interval: int) -> None:
    """-0.1, -inf, NaN (of several kinds), -0.0: the same bits."""
    bench = Bench(side, "default")
    (handle,) = bench.admit(Request("r", return_logprob=True, stream_interval=interval))
    patterns = list(ODD_BITS.values())
    got: list[int] = []
    for pattern in patterns:
        value = np.array([pattern], np.uint32).view(np.float32)
        for row in bench.rows(bench.engine.step(np.array([handle]), np.array([[5]]), logprobs=value)):
            got += row.logprobs
    for row in bench.rows(bench.engine.pack(np.array([handle]), control=flush())):
        got += row.logprobs
    assert got == patterns


def flush() -> Control:
    control = Control(1).reset(1)
    control.flags[0] = L.CONTROL_FLUSH
    return control


def test_first_token_flush(side: str) -> None:
    """The option sends the first token of a request that does not stream at once, and only that."""
    bench = Bench(side, EmitPolicy(first_token_flush=True), force_interval=3)
    (handle,) = bench.admit(Request("r", stream=False))
    sent = [len(bench.step([handle], [ids(place, place + 1)])) for place in range(7)]
    assert sent == [1, 0, 0, 1, 0, 0, 1]
