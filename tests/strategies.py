"""Hypothesis strategies: configurations, requests and random lives of a packer.

A life is plain data. Its numbers are resolved by whoever plays it (`test_lives.Play`): a pick is taken
modulo what is there, so every life is valid whatever is cut out of it while shrinking.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from gpupack.core.config import EmitPolicy, PackerConfig
from gpupack.core.request import NO_LIMIT, Request

PRESETS = {
    "default": EmitPolicy(),
    "sglang_0_5_16": EmitPolicy.sglang_0_5_16(),
    "sglang_0_5_23": EmitPolicy.sglang_0_5_23(),
}

# Bit patterns that a conversion, a comparison or an addition would change.
ODD_BITS = {
    "-0.1": 0xBDCCCCCD,
    "-inf": 0xFF800000,
    "nan": 0x7FC00000,
    "negative nan with payload": 0xFFC01234,
    "signalling nan": 0x7F800001,
    "-0.0": 0x80000000,
    "smallest denormal": 0x00000001,
}


def mostly(usual: Any, *others: Any, weight: int = 4) -> st.SearchStrategy[Any]:
    """`usual` most of the time, and first when shrinking."""
    return st.sampled_from([usual] * weight + list(others))


# --- Configuration --------------------------------------------------------------------------------


def policies() -> st.SearchStrategy[EmitPolicy]:
    """The default, both presets and every mix of options."""
    rules = st.sampled_from(["unsent", "modulo"])
    mixes = st.builds(EmitPolicy, rules, rules, *[st.booleans()] * 5)
    return st.sampled_from(list(PRESETS.values())) | mixes


@st.composite
def configs(draw: st.DrawFn, policy: st.SearchStrategy[EmitPolicy] | None = None) -> PackerConfig:
    """Small configurations, so that windows, slots and stop ids are met all the time.

    Left out: a window that leaves no room for a backlog beside the steps in flight (ConfigError);
    more than two steps in flight (nothing distinguishes the third); windows over 16 (an early send
    would be rare); a capacity below 4 (a batch could not hold rows of every kind).
    """
    window = draw(st.sampled_from([8, 4, 16]))
    in_flight = draw(st.integers(1, 2))
    vocab = draw(mostly(1000, 8, 12, weight=3))
    logprobs = draw(mostly(True, False, weight=6))
    return PackerConfig(
        vocab_size=vocab,
        eos_token_ids=tuple(draw(st.sampled_from([(), (1,), (1, 3)]))),
        capacity=draw(st.sampled_from([8, 4, 9])),
        window=window,
        max_in_flight=in_flight,
        max_accept=draw(st.integers(1, min(3 if window < 16 else 4, (window - 1) // in_flight))),
        stream_interval=draw(mostly(1, 2, 3, 4)),
        force_interval=draw(st.sampled_from([3, 1, 2, 5, 50])),
        logprobs=logprobs,
        max_top_logprobs=draw(mostly(0, 1, 3, weight=2)) if logprobs else 0,
        max_token_ids_logprobs=draw(mostly(0, 2, weight=2)) if logprobs else 0,
        family_window=draw(st.sampled_from([8, window])) if window > 8 else None,
        speculative=draw(mostly(False, True, weight=2)),
        policy=draw(policies() if policy is None else policy),
    )


# --- Requests -------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn, config: PackerConfig, rid: str) -> Request:
    """Requests of every judge, kind and interval.

    Left out: logprobs where the configuration has none, and judge="device" with stop strings or more
    stop ids than the device keeps (InputError, see test_packer.py).
    """
    judge = draw(mostly(None, "device", "host", "engine", weight=4))
    crowd = judge != "device" and draw(mostly(False, True, weight=12))  # too many stop ids for the device
    stops = list(range(2, 11)) if crowd else draw(st.lists(st.sampled_from([2, 5, config.vocab_size - 1]), max_size=2))
    return_logprob = config.logprobs and draw(mostly(True, False, weight=2))
    return Request(
        rid,
        max_new_tokens=draw(mostly(NO_LIMIT, 40, 20, 9, 5, 3, 2, 1, 0, weight=6)),
        stream=draw(mostly(True, False, weight=2)),
        stream_interval=draw(st.sampled_from([None, 0, 1, 2, 3, 4, 7, 50])),
        stop_token_ids=stops,
        ignore_eos=draw(mostly(False, True, weight=5)),
        stop=("x",) if judge is None and draw(mostly(False, True, weight=6)) else (),
        judge=judge,
        return_logprob=return_logprob,
        top_logprobs_num=draw(st.integers(0, config.max_top_logprobs)) if return_logprob else 0,
        token_ids_logprob=draw(st.lists(st.integers(0, 99), max_size=config.max_token_ids_logprobs))
        if return_logprob
        else (),
    )


# --- Lives ----------------------------------------------------------------------------------------


@dataclass
class Admit:
    """Begin requests."""

    requests: list[Request]


@dataclass
class Readmit:
    """Begin a retracted request again, its output kept or dropped."""

    pick: int
    dropped: bool


@dataclass
class End:
    """Retract or retire a request, with whatever is in flight."""

    pick: int
    retract: bool
    back: int
    """How many of the committed tokens the host forgets."""


@dataclass
class TakeIn:
    """Wait for the oldest step in flight."""


@dataclass
class RowPlan:
    """One row of a batch."""

    pick: int
    """0: padding; 1: a handle that has ended or was never given; else a live one."""
    run: list[int]
    """Kinds of the accepted tokens: 0 stop id, 1 outside the vocabulary, else a fresh id."""
    action: str
    back: int
    """Where FINISH cuts or the visible length ends, counted back from the output length."""
    code: int
    bits: int
    """Index of an odd logprob pattern, else a fresh one."""


@dataclass
class Batch:
    """One call of step, append or pack."""

    kind: str
    rows: list[RowPlan]
    return_logprob: bool = True
    with_control: bool = False
    wide: bool = False  # int64 token ids
    extra: int = 0  # columns of token_ids beyond the longest run
    extra_scores: int = 0  # and of logprobs
    lens: int = 0  # speculative lens: none, block_accept_lens, cap_lens too
    flat: bool = False  # [B] instead of [B, 1] where every run is one token
    everyone: bool = False  # the rows are for all live handles in turn, whatever their picks
    times: int = 1  # with fresh tokens each time


@dataclass
class Life:
    """A packer's life: a configuration and what is done with it."""

    config: PackerConfig
    convey: bool
    ops: list[Any] = field(default_factory=list)


ACTIONS = ["none"] * 12 + ["skip", "hold", "hold", "flush", "finish"]
ACTIONS += ["visible", "visible", "hold+visible", "flush+visible", "retracted"]


@st.composite
def row_plans(draw: st.DrawFn, config: PackerConfig, actions: list[str]) -> RowPlan:
    return RowPlan(
        pick=draw(st.integers(0, 11)),
        run=draw(st.lists(st.integers(0, 19).map(lambda kind: (kind + 2) % 20), max_size=config.max_accept)),
        action=draw(st.sampled_from(actions)),
        back=draw(st.integers(-1, 9)),
        code=draw(st.integers(1, 5)),
        bits=draw(st.integers(0, 13)),
    )


@st.composite
def batches(draw: st.DrawFn, config: PackerConfig, actions: list[str], return_logprob: bool) -> Batch:
    return Batch(
        kind=draw(mostly("step", "append", "pack", weight=5)),
        rows=draw(st.lists(row_plans(config, actions), max_size=min(6, config.batch_capacity))),
        return_logprob=return_logprob or draw(mostly(True, False, weight=2)),
        with_control=draw(mostly(False, True, weight=3)),
        wide=draw(st.booleans()),
        extra=draw(mostly(0, 1, 2)),
        extra_scores=draw(mostly(0, 1, 2)),
        lens=draw(st.integers(0, 2)),
        flat=draw(st.booleans()),
        everyone=draw(st.booleans()),
        times=draw(mostly(1, 2, 3, 6, 9, weight=3)),
    )


@st.composite
def lives(
    draw: st.DrawFn,
    policy: st.SearchStrategy[EmitPolicy] | None = None,
    *,
    always_return_logprob: bool = False,
    actions: list[str] | None = None,
    max_ops: int = 14,
) -> Life:
    """Lives of a packer.

    Left out, because the call refuses it (InputError, see test_packer.py): a handle twice in one
    batch, HOLD with FLUSH, a visible length that leaves more than the window holds, a cut behind the
    output. Left out, because the host must not: retracting a request whose finish was found by an
    `append` that it has taken in and not packed (nobody could tell the next handle of that finish), and
    forgetting tokens whose logprobs were sent.
    """
    config = draw(configs(policy))
    life = Life(config, convey=draw(mostly(False, True, weight=2)))
    admitted = 0

    def admit() -> Admit:
        nonlocal admitted
        new = [draw(requests(config, f"r{admitted + i}")) for i in range(draw(st.integers(1, 3)))]
        admitted += len(new)
        return Admit(new)

    life.ops.append(admit())
    kinds = st.lists(mostly("batch", "take in", "end", "readmit", "admit", weight=9), min_size=3, max_size=max_ops)
    for kind in draw(kinds):
        if kind == "batch":
            life.ops.append(draw(batches(config, actions or ACTIONS, always_return_logprob)))
        elif kind == "take in":
            life.ops.append(TakeIn())
        elif kind == "end":
            back = draw(mostly(0, 1, 2))
            life.ops.append(End(draw(st.integers(0, 7)), draw(mostly(True, False, weight=3)), back))
            if draw(st.booleans()):  # at once, while its old rows are in flight
                life.ops.append(Readmit(0, draw(mostly(False, True, weight=2))))
        elif kind == "readmit":
            life.ops.append(Readmit(draw(st.integers(0, 3)), draw(mostly(False, True, weight=2))))
        else:
            life.ops.append(admit())
    return life
