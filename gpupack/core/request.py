"""Request: what the host knows of a request; Resume: where a retracted one stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.errors import InputError

FinishReason = dict[str, Any]
"""`{type: stop, matched}`, `{type: length, length}` or `{type: abort, message, status_code, err_type}`."""

Judge = Literal["device", "host", "engine"]

FLAGS = (
    "stream",
    "ignore_eos",
    "return_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
)
NUMBERS = ("max_new_tokens", "stream_interval", "cached_tokens", "top_logprobs_num", "prompt_tokens")
_flags_of, _numbers_of = attrgetter(*FLAGS), attrgetter(*NUMBERS)
MAX_NAME = 4096  # characters of a request's name, or of its worker's
PROMPT_TAIL = 5  # prompt tokens that go with the first row, for the detokenizer's context (SPEC.md section 3)
NO_LIMIT = 2**31 - 1


def _is_int32(value: Any, low: int) -> bool:
    if type(value) is int:  # nearly always, and in a quarter of the time
        return low <= value <= NO_LIMIT
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and low <= int(value) <= NO_LIMIT


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # a lone surrogate
        return False


def is_reason(value: Any) -> bool:
    """Whether a finish reason can travel: a dict of names to strings, numbers of 64 bits, booleans or None."""
    if not isinstance(value, dict) or not _is_text(value.get("type")):
        return False
    return all(_is_text(name) and (_is_text(entry) or _is_scalar(entry)) for name, entry in value.items())


def _is_scalar(value: Any) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**64
    return type(value) in (float, bool, type(None))


@dataclass(slots=True, eq=False)
class Request:
    """One generation job, as the scheduler hands it to `OutputStreamer.admit` or `Packer.admit`.

    Parameters
    ----------
    rid
        Name of the request at the receiver.
    prompt_ids
        The unpadded prompt.
    prompt_tokens
        Length of the prompt to be told, where it is not that of `prompt_ids` (padded multimodal prompts).
    max_new_tokens
        Length cap.
    stream, stream_interval
        Whether it streams, and its own interval (None or 0: the server's).
    stop_token_ids, ignore_eos
        Stop ids beside the model's end-of-sequence ids; `ignore_eos` switches off both.
    stop
        Stop strings; a request with any is host-judged.
    judge
        Who finds the finish: "device"; "host", the streamer's stop-string judge; or "engine", which
        passes its decisions as control. None: "host" with stop strings or with more stop ids than
        the device keeps, else "device".
    return_logprob
        Send the logprob of each sampled token.
    top_logprobs_num, token_ids_logprob
        With `return_logprob`: how many top logprobs a position, and the token ids whose logprobs to send.
    return_hidden_states, return_routed_experts, return_indexer_topk
        Send what `OutputStreamer.attach` is given of these; their columns are there for the whole batch.
    http_worker_ipc, decoded_text, cached_tokens, skip_special_tokens, spaces_between_special_tokens, no_stop_trim
        Passed on in the opening record.
    """

    rid: str
    prompt_ids: Sequence[int] = ()
    prompt_tokens: int | None = None
    max_new_tokens: int = NO_LIMIT
    stream: bool = True
    stream_interval: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    judge: Judge | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: Sequence[int] = ()
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    return_indexer_topk: bool = False
    http_worker_ipc: str | None = None
    decoded_text: str = ""
    cached_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    finish_reason: FinishReason | None = field(default=None, init=False)
    """Set when the host ends the request; a device-judged finish is in its final row."""

    def __post_init__(self) -> None:
        if not _is_text(self.rid) or not self.rid:
            raise InputError(f"rid: expected a non-empty string that UTF-8 can encode, got {self.rid!r}")
        for name, value in zip(NUMBERS, _numbers_of(self), strict=True):
            optional = value is None and name in ("stream_interval", "prompt_tokens")
            if not optional and not _is_int32(value, 0):
                raise InputError(f"{name} of {self.rid}: expected an integer from 0 to {NO_LIMIT}, got {value!r}")
        for name, flag in zip(FLAGS, _flags_of(self), strict=True):
            if flag is not True and flag is not False:
                raise InputError(f"{name} of {self.rid}: expected True or False, got {flag!r}")
        if self.decoded_text != "" and not _is_text(self.decoded_text):
            raise InputError(f"decoded_text of {self.rid}: expected a string for UTF-8, got {self.decoded_text!r}")
        if self.http_worker_ipc is not None and not _is_text(self.http_worker_ipc):
            worker = self.http_worker_ipc
            raise InputError(f"http_worker_ipc of {self.rid}: expected a string for UTF-8, got {worker!r}")
        for name, text in (("rid", self.rid), ("http_worker_ipc", self.http_worker_ipc or "")):
            if len(text) > MAX_NAME:
                raise InputError(f"{name}: expected at most {MAX_NAME} characters, got {len(text)}")
        self._check_sequences()
        if self.family_width and not self.return_logprob:
            raise InputError(f"return_logprob of {self.rid}: expected True with top or token-ids logprobs, got False")
        if self.judge not in (None, "device", "host", "engine"):
            raise InputError(f"judge of {self.rid}: expected device, host, engine or None, got {self.judge!r}")
        if self.judge == "device" and self.stop:
            raise InputError(f"judge of {self.rid}: stop strings cannot be judged on the device")

    def _check_sequences(self) -> None:
        try:
            tail, stop_ids, stop = list(self.prompt_ids[-PROMPT_TAIL:]), list(self.stop_token_ids), list(self.stop)
            scored = list(self.token_ids_logprob)
        except TypeError as error:
            names = "prompt_ids, stop_token_ids, stop, token_ids_logprob"
            raise InputError(f"{names} of {self.rid}: expected sequences: {error}") from None
        for name, ids in (("prompt_ids", tail), ("stop_token_ids", stop_ids), ("token_ids_logprob", scored)):
            if ids and not all([_is_int32(token, -NO_LIMIT - 1) for token in ids]):  # a list: faster for few
                raise InputError(f"{name} of {self.rid}: expected integers of 32 bits, got {ids!r}")
        if isinstance(self.stop, str) or (stop and not all(_is_text(text) and text for text in stop)):
            raise InputError(f"stop of {self.rid}: expected a sequence of non-empty strings, got {self.stop!r}")

    @property
    def prompt_tail(self) -> list[int]:
        """Up to 5 last tokens of the prompt; their number is the read offset."""
        return [int(token) for token in self.prompt_ids[-PROMPT_TAIL:]]

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, as the receiver is told."""
        return len(self.prompt_ids) if self.prompt_tokens is None else self.prompt_tokens

    @property
    def family_width(self) -> int:
        """Words of a position's record in the family section."""
        return 2 * self.top_logprobs_num + len(self.token_ids_logprob)

    @property
    def widths(self) -> int:
        """`layout.WIDTHS` of this request."""
        return self.top_logprobs_num | len(self.token_ids_logprob) << L.IDS_WIDTH_SHIFT

    def stop_ids(self, eos_token_ids: Sequence[int]) -> list[int]:
        """End-of-sequence and stop ids that end this request, each once, in that order."""
        return [] if self.ignore_eos else list(dict.fromkeys([*eos_token_ids, *self.stop_token_ids]))

    def judged_by(self, eos_token_ids: Sequence[int]) -> Judge:
        """Who finds the finish of this request."""
        most = len(eos_token_ids) + len(self.stop_token_ids)  # as some may be the same
        too_many = most > L.MAX_STOP_IDS and len(self.stop_ids(eos_token_ids)) > L.MAX_STOP_IDS
        if self.judge == "device" and too_many:
            raise InputError(
                f"stop_token_ids of {self.rid}: expected at most {L.MAX_STOP_IDS} ids with the end-of-sequence ids "
                f"for judge='device', got {len(self.stop_ids(eos_token_ids))}"
            )
        return self.judge or ("host" if self.stop or too_many else "device")


@dataclass(frozen=True, slots=True, eq=False)
class Resume:
    """Where a retracted request stands: what `Packer.retract` returns and `admit(resume=)` takes.

    `unsent_tokens` int32 `[output_len - token_cursor]` and `unsent_logprobs` float32
    `[output_len - logprob_cursor]` (empty without logprobs) are host arrays of the items that were
    committed and not sent.
    """

    output_len: int = 0
    token_cursor: int = 0
    logprob_cursor: int = 0
    unsent_tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    unsent_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    unsent_families: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """The records of the same positions as `unsent_logprobs`, joined; empty without families."""
    spec_counts: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """The speculative counters, int32 `[spec_width]`; empty: all 0. A step in flight that is discarded has counted."""
    opened: bool = False
    """A row of the request has been sent under an earlier handle."""
    restarted: bool = False
    """Its output was dropped: the next row tells the receiver to discard what it holds."""
    restarts: int = 0
    """How often its output was dropped."""
    watch: Any = None
    """What the stop-string judge remembers of its text; None: nothing."""
    input_logprobs_sent: bool = False
    """A row has carried its input logprobs, which go once."""
    kept: Any = None
    """What `OutputStreamer.attach` and `set_counts` were given, for the rows to come; None without a streamer."""

    def dropped(self) -> Resume:
        """The same request, its output dropped: it starts over (SPEC.md section 4, restart)."""
        return Resume(
            opened=self.opened,
            restarted=self.opened,
            restarts=self.restarts + 1,
            input_logprobs_sent=self.input_logprobs_sent,
            kept=None if self.kept is None else self.kept.dropped(),
        )

    def check(self, request: Request, config: PackerConfig) -> None:
        """Raise InputError unless cursors and items fit each other and the windows."""
        for name in ("output_len", "token_cursor", "logprob_cursor"):
            if not _is_int32(getattr(self, name), 0):
                raise InputError(
                    f"resume.{name} of {request.rid}: expected 0 to {NO_LIMIT}, got {getattr(self, name)!r}"
                )
        first_score = self.logprob_cursor if request.return_logprob else self.output_len
        limit, scores_limit = config.backlog_limit, config.backlog_limit
        if request.family_width:
            scores_limit = min(config.backlog_limit, config.family_limit)
        for name, cursor, items, most, width in (
            ("unsent_tokens", self.token_cursor, self.unsent_tokens, limit, 1),
            ("unsent_logprobs", first_score, self.unsent_logprobs, scores_limit, 1),
            ("unsent_families", first_score, self.unsent_families, scores_limit, request.family_width),
        ):
            expected = max(self.output_len - cursor, 0) * width
            if cursor < 0 or len(items) != expected or expected > most * width:
                raise InputError(
                    f"resume.{name} of {request.rid}: expected {expected} items, at most {most * width} "
                    f"(output_len {self.output_len}, cursor {cursor}), got {len(items)}"
                )
        if not 0 <= self.token_cursor <= self.output_len:
            raise InputError(
                f"resume.token_cursor of {request.rid}: expected 0 to {self.output_len}, got {self.token_cursor}"
            )
        if len(self.spec_counts) not in (0, config.spec_width):
            raise InputError(
                f"resume.spec_counts of {request.rid}: expected 0 or {config.spec_width}, got {len(self.spec_counts)}"
            )


FRESH = Resume()
"""Where a request stands that was never here; one for all of them."""
