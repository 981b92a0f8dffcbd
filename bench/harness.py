"""Runs the cases: all peers of a case live at once and take turns, so that what disturbs one disturbs all.

    scheduler process  --  zmq, ipc  -->  receiver process        one such pair a peer, in its own environment

Before anything is timed the receivers' contents, joined by request, must be equal. What the clocks include:

- scheduler: from the sampled tokens on the host to the hand-over to zmq. gpupack's includes admitting, retiring
  and appending the tokens; the others' requests have theirs already;
- receiver: from a message that zmq has to verified columns ("views") or to Python lists by request ("deltas");
- CPU: of the thread that does this, in the receiver freeing the message included;
- hop: from the tokens on the host to the deltas in the other process, at a given rate.

The garbage collector is on, as it is in engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from peers import PEERS, Pair
from questions import Case
from rows import Row, environment
from tally import Tally, hop_row
from workload import Workload

ROUNDS, ROUND_S = 6, 0.15
QUICK = (2, 0.03)
MOST_SAMPLES = 400  # of a round
COUNTED_STEPS = 10
PACED_STEPS, PACED_ROUNDS = 1000, 2
WAVES = 3  # in a round
LIFE_STEPS = 2000  # in a round

Measured = Iterator[tuple[Pair, Row]]


class Harness:
    """The processes of all peers that are there, and what is common to the rows of one run."""

    def __init__(self, names: Iterable[str], *, quick: bool = False) -> None:
        self.rounds, self.round_s = QUICK if quick else (ROUNDS, ROUND_S)
        self.shared = environment()
        self.pairs: dict[str, Pair] = {}
        for name in names:
            if PEERS[name].there:
                self.pairs[name] = Pair(name)
            else:
                print(f"{name} is left out: no {PEERS[name].python}")
        for pair in self.pairs.values():  # which import at the same time
            pair.ask()
        for pair in self.pairs.values():
            pair.hear()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *error: object) -> None:
        for pair in self.pairs.values():
            pair.close()

    def rows(self, case: Case) -> Iterator[Row]:
        """The rows of one case."""
        pairs = [self.pairs[name] for name in case.peers if name in self.pairs]
        memory = case.question == "memory"
        idle = {pair.name: _memory(pair) for pair in pairs if memory}
        _begin_equal(case.work, pairs)
        measured = self._timed(case.work, pairs)
        if memory:
            measured = _grown(pairs, idle)
        elif case.work.rate:
            measured = self._paced(pairs)
        for pair, row in measured:
            about = {**self.shared, **pair.about, "question": case.question, "variant": pair.name}
            yield {**about, **asdict(case.work), **row}
        for pair in pairs:
            pair.end()

    def _timed(self, work: Workload, pairs: list[Pair]) -> Measured:
        """Rounds of all pairs in turn, in an order that turns round each time; then blocks are counted."""
        tallies = [Tally(work) for _ in pairs]
        seconds, most, rounds = self.round_s, MOST_SAMPLES, self.rounds
        if work.output_len:
            seconds, most = 60.0, min(WAVES * work.output_len, LIFE_STEPS)
            rounds = max(work.output_len // LIFE_STEPS, self.rounds // 2)
        for turn in range(rounds):
            for tally, pair in list(zip(tallies, pairs, strict=True))[:: 1 if turn % 2 else -1]:
                tally.add(pair.scheduler.call("round", seconds=seconds, most=most), pair.receiver.call("report"))
        for tally, pair in zip(tallies, pairs, strict=True):
            blocks = {} if work.output_len else _blocks(pair, max(COUNTED_STEPS, work.interval))
            for row in tally.rows(pair.scheduler.call("stages"), pair.receiver.call("stages")):
                yield pair, row | blocks

    def _paced(self, pairs: list[Pair]) -> Measured:
        """Rounds at the workload's rate."""
        hops: dict[str, list[float]] = {pair.name: [] for pair in pairs}
        took = dict.fromkeys(hops, 0)
        for _ in range(PACED_ROUNDS):
            for pair in pairs:
                sent = pair.scheduler.call("paced", steps=PACED_STEPS)
                got = pair.receiver.call("report", messages=PACED_STEPS)
                hops[pair.name] += [end - start for start, end in zip(sent["starts"], got["ends"], strict=True)]
                took[pair.name] += sent["took_ns"]
        for pair in pairs:
            yield pair, hop_row(hops[pair.name], took[pair.name])


def _begin_equal(work: Workload, pairs: list[Pair]) -> None:
    """Begin a workload, and let everyone run the steps of its beginning; AssertionError if the contents differ."""
    steps = 2 * work.output_len if 0 < work.output_len < 100 else work.interval + 8
    step_bytes = 0.0
    digests = {}
    for pair in pairs:
        pair.begin(work, step_bytes)
        pair.receiver.call("watch", on=True)
        sent = pair.scheduler.call("steps", count=steps)
        pair.receiver.call("report")
        digests[pair.name] = pair.receiver.call("watch", on=False)
        step_bytes = step_bytes or sent["step_bytes"]
    if len(set(digests.values())) > 1:
        raise AssertionError(f"{work}: expected the same contents from all peers, got {digests}")


def _memory(pair: Pair) -> dict[str, dict[str, int]]:
    return {"scheduler": pair.scheduler.call("memory"), "receiver": pair.receiver.call("memory")}


def _grown(pairs: list[Pair], idle: dict[str, Any]) -> Measured:
    """Bytes of the processes before the requests came, and how much those with their first steps added."""
    for pair in pairs:
        now = _memory(pair)
        for side, bytes_now in now.items():
            before = idle[pair.name][side]["resident"]
            state = {"state": bytes_now["state"]} if bytes_now.get("state") else {}
            yield pair, {"stage": f"{side} memory", "idle": before, "grown": bytes_now["resident"] - before, **state}


def _blocks(pair: Pair, steps: int) -> dict[str, float]:
    """Blocks that Python's allocator hands out: on the scheduler's side by step, in the receiver by message."""
    pair.receiver.call("count", on=True)
    scheduler = pair.scheduler.call("count", steps=steps)["blocks"]
    receiver = pair.receiver.call("count", on=False)["blocks"]
    pair.receiver.call("report")
    return {"scheduler_blocks": scheduler, "receiver_blocks": receiver}
