"""PackerConfig and EmitPolicy: frozen, checked when made, and saying what memory they take."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from gpupack.core import layout as L
from gpupack.core.errors import ConfigError

Device = Literal["cpu", "cuda", "interpret"]
Transfer = Literal["mapped", "copy"]
Wait = Literal["block", "spin"]
Rule = Literal["modulo", "unsent"]

INT32_MAX = 2**31 - 1
MAX_FAMILY = 1024  # top or token-ids logprobs a position
FAMILY_WINDOW = 64


@dataclass(frozen=True)
class EmitPolicy:
    """When a request sends (SPEC.md section 2). The default is sglang 0.5.23's rule, mended.

    Parameters
    ----------
    stream_rule, force_rule
        "modulo": by the output length; "unsent": by the tokens not yet sent. For requests that
        stream, and for those that do not.
    hold_forced
        Forced sends of requests that do not stream respect the hold.
    send_empty
        A due request sends a row even with nothing unsent.
    first_token_flush
        The first token of a request that does not stream goes at once.
    logprob_before_token
        A logprob may be counted as sent before it exists, and is then lost.
    retracted_logprobs
        Logprobs of a request that is being retracted end at its visible length, also where that is 0.
    """

    stream_rule: Rule = "unsent"
    force_rule: Rule = "unsent"
    hold_forced: bool = True
    send_empty: bool = False
    first_token_flush: bool = False
    logprob_before_token: bool = False
    retracted_logprobs: bool = False

    def __post_init__(self) -> None:
        for name in ("stream_rule", "force_rule"):
            if getattr(self, name) not in ("modulo", "unsent"):
                raise ConfigError(f"{name}: expected 'modulo' or 'unsent', got {getattr(self, name)!r}")

    @classmethod
    def sglang_0_5_16(cls) -> EmitPolicy:
        """The rules of `sglang==0.5.16`, faults included."""
        return cls("modulo", "modulo", hold_forced=False, send_empty=True, logprob_before_token=True)

    @classmethod
    def sglang_0_5_23(cls) -> EmitPolicy:
        """The rules of `sglang==0.5.23`, faults included."""
        return cls(
            "unsent", "modulo", hold_forced=False, send_empty=True, logprob_before_token=True, retracted_logprobs=True
        )

    @property
    def bits(self) -> int:
        """The policy as `layout.POLICY_*` bits."""
        return (
            L.POLICY_STREAM_UNSENT * (self.stream_rule == "unsent")
            | L.POLICY_FORCE_UNSENT * (self.force_rule == "unsent")
            | L.POLICY_HOLD_FORCED * self.hold_forced
            | L.POLICY_SKIP_EMPTY * (not self.send_empty)
            | L.POLICY_FIRST_TOKEN_FLUSH * self.first_token_flush
            | L.POLICY_LOGPROB_EXISTING * (not self.logprob_before_token)
            | L.POLICY_RETRACTED_LOGPROBS * self.retracted_logprobs
        )


@dataclass(frozen=True)
class PackerConfig:
    """Sizes and rules of a packer; `memory_bytes` says what they cost before anything is allocated.

    Parameters
    ----------
    vocab_size
        A device-judged token id outside `[0, vocab_size)` aborts its request.
    eos_token_ids
        End-of-sequence ids of the model, for requests without `ignore_eos`.
    capacity
        Slots: how many requests can be open at once.
    max_batch
        Rows of the largest batch; `capacity` unless given.
    window
        Unsent items kept per slot and channel, a power of two.
    max_accept
        Most tokens that one step accepts for a request.
    max_in_flight
        Steps that may be launched and not yet taken in.
    stream_interval, force_interval
        The server's interval for requests that stream without one of their own, and for those that
        do not stream.
    logprobs
        Keep and send the logprob of each sampled token of requests that ask for it.
    max_top_logprobs, max_token_ids_logprobs
        Most top-k logprobs and most token-ids logprobs that a request may ask for.
    family_window
        Unsent positions of top-k and token-ids logprobs kept per slot, a power of two; `window`, but
        at most 64 where `max_accept` allows, unless given.
    speculative
        Count verify steps, correct drafts and their histograms, and send them with each row.
    device
        "cpu": the CPU backend; "cuda": the Triton kernel on the current CUDA device; "interpret": the
        same kernel under Triton's interpreter (TRITON_INTERPRET=1), for tests.
    transfer
        How a packed step reaches the host from a device: "mapped", the kernel writes to pinned memory; "copy", it
        writes to device memory, which is copied (the only way under confidential computing).
    wait
        Waiting for a step of a device: "block" the thread, or "spin".
    ring_timeout_s
        How long a step on a device waits for a buffer that a reader on another thread still has, before
        BufferBusyError; on the CPU it does not wait.
    policy
        When a request sends.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    capacity: int = 4096
    max_batch: int | None = None
    window: int = 256
    max_accept: int = 1
    max_in_flight: int = 2
    stream_interval: int = 1
    force_interval: int = 50
    logprobs: bool = True
    max_top_logprobs: int = 0
    max_token_ids_logprobs: int = 0
    family_window: int | None = None
    speculative: bool = False
    device: Device = "cpu"
    transfer: Transfer = "mapped"
    wait: Wait = "block"
    ring_timeout_s: float = 0.0
    policy: EmitPolicy = field(default_factory=EmitPolicy)

    def __post_init__(self) -> None:
        if self.max_batch is None:
            object.__setattr__(self, "max_batch", self.capacity)
        if self.family_window is None:
            object.__setattr__(
                self,
                "family_window",
                self.window if self.max_accept >= FAMILY_WINDOW else min(self.window, FAMILY_WINDOW),
            )
        for name, low, high in (
            ("vocab_size", 1, INT32_MAX),
            ("capacity", 1, 1 << 24),
            ("max_batch", 1, self.capacity),
            ("window", 2, 1 << 20),
            ("max_accept", 1, 1 << 16),
            ("max_in_flight", 1, 64),
            ("stream_interval", 1, INT32_MAX),
            ("force_interval", 1, INT32_MAX),
            ("max_top_logprobs", 0, MAX_FAMILY),
            ("max_token_ids_logprobs", 0, MAX_FAMILY),
            ("family_window", 2, self.window),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name}: expected an integer from {low} to {high}, got {value!r}")
        eos = self.eos_token_ids
        if not isinstance(eos, tuple) or not all(isinstance(i, int) and 0 <= i <= INT32_MAX for i in eos):
            raise ConfigError(f"eos_token_ids: expected a tuple of integers from 0 to {INT32_MAX}, got {eos!r}")
        if not isinstance(self.policy, EmitPolicy):
            raise ConfigError(f"policy: expected an EmitPolicy, got {self.policy!r}")
        for name in ("window", "family_window"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ConfigError(f"{name}: expected a power of two, got {value}")
            if value <= self.max_accept and (name == "window" or self.family_width):
                raise ConfigError(f"{name}: expected more than max_accept = {self.max_accept}, got {value}")
        if self.family_width and not self.logprobs:
            raise ConfigError("logprobs: expected True with max_top_logprobs or max_token_ids_logprobs, got False")
        for name, choices in (("device", Device), ("transfer", Transfer), ("wait", Wait)):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name}: expected one of {get_args(choices)}, got {getattr(self, name)!r}")
        if not 0 <= self.ring_timeout_s <= 3600:
            raise ConfigError(f"ring_timeout_s: expected 0 to 3600, got {self.ring_timeout_s!r}")
        self._check_memory()

    @property
    def batch_capacity(self) -> int:
        """`max_batch`, resolved."""
        assert self.max_batch is not None
        return self.max_batch

    @property
    def family_width(self) -> int:
        """Words of the widest record of a position: values and ids of top logprobs, values of token ids."""
        return 2 * self.max_top_logprobs + self.max_token_ids_logprobs

    @property
    def family_positions(self) -> int:
        """`family_window`, resolved."""
        assert self.family_window is not None
        return self.family_window

    @property
    def family_limit(self) -> int:
        """Unsent positions that a slot keeps of top-k and token-ids logprobs; see `backlog_limit`."""
        return self.family_positions - self.max_accept

    @property
    def spec_width(self) -> int:
        """Words of a slot's speculative counters; 0 without them."""
        return L.spec_width(self.max_accept) if self.speculative else 0

    @property
    def visible_limit(self) -> int:
        """How far a visible length may stay behind the output, of any request of this packer."""
        return min(self.backlog_limit, self.family_limit) if self.family_width else self.backlog_limit

    @property
    def packed_shape(self) -> L.PackedShape:
        """What the places of a packed step follow from."""
        return L.PackedShape(self.max_items, self.logprobs, self.family_positions * self.family_width, self.spec_width)

    @property
    def backlog_limit(self) -> int:
        """Unsent items that a slot keeps; a row is sent early before there are more.

        So the items that a step sends and those that it keeps never share a place of the ring: the
        kernel needs no order between reading the ones and writing the others.
        """
        return self.window - self.max_accept

    @property
    def max_items(self) -> int:
        """Most items of one channel that a row can carry in one step: a full backlog and a run."""
        return self.backlog_limit + self.max_accept

    @property
    def state_bytes(self) -> int:
        """Bytes of the state arena and the rings."""
        channels = 2 if self.logprobs else 1
        families = self.family_positions * self.family_width
        return L.WORD * self.capacity * (L.STATE_WIDTH + channels * self.window + families + self.spec_width)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all packed-step buffers, each fit for the fullest step."""
        one = L.packed_layout(self.batch_capacity, self.packed_shape).size
        return L.WORD * one * self.buffers

    @property
    def buffers(self) -> int:
        """Packed-step buffers: one for each step in flight and one that is being read."""
        return self.max_in_flight + 1

    @property
    def memory_bytes(self) -> int:
        """Bytes that a packer of this configuration allocates, host gate included."""
        return 2 * self.state_bytes + self.buffer_bytes * 2

    def _check_memory(self) -> None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.memory_bytes > total:
            raise ConfigError(
                f"capacity, max_batch, window: need {self.memory_bytes} bytes, expected at most the machine's {total}"
            )


def crash_after_stream_outputs() -> int:
    """How many calls of `OutputStreamer.stream_output` or `stream_embeddings` go well; 0: all of them.

    SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS, for tests of what becomes of an engine. ConfigError if it is no number.
    """
    text = os.environ.get("SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS", "0")
    try:
        return max(int(text), 0)
    except ValueError:
        raise ConfigError(f"SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS: expected an integer, got {text!r}") from None
