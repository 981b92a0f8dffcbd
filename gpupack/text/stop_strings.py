"""StopStringJudge: finish and hold of requests with stop strings, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.request import Request, Resume
from gpupack.core.row_control import Control
from gpupack.streamer.passthrough import Conveyed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what decoding gives for a character of which bytes are still to come
CONTEXT = 4  # tokens decoded before those that can matter: decoders treat the first of a text differently


class StopWatch:
    """The last tokens of one request, as many as its longest stop string can span."""

    __slots__ = ("length", "request", "stop_ids", "tokens", "window")

    def __init__(self, request: Request, length: int, stop_ids: frozenset[int]) -> None:
        self.request = request
        self.length = length
        self.tokens: list[int] = []
        # A token stands for at least one byte.
        self.window = max((len(stop.encode()) for stop in request.stop), default=0) + CONTEXT
        self.stop_ids = stop_ids

    def take(self, token_id: int, tokenizer: Tokenizer) -> str:
        """Take in one token; the text of the last tokens, special ones included."""
        self.length += 1
        self.tokens = [*self.tokens[1 - self.window :], token_id]
        return tokenizer.decode(self.tokens, skip_special_tokens=False)


class StopStringJudge:
    """Finds stop strings in the text of host-judged requests and holds what could begin one.

    Looked at is the text of all tokens, special ones included, as SGLang does. The order is
    SPEC.md section 2's: an invalid id goes before a stop string, which goes before stop ids and length;
    a stop string completed beyond `max_new_tokens` counts as length. Invalid ids, length and the stop
    ids that fit the state are the gate's own business. Costs Python work for each request with a stop
    string and step, and nothing for others.
    """

    def __init__(self, tokenizer: Tokenizer, config: PackerConfig) -> None:
        """`config` is the packer's: vocabulary size and end-of-sequence ids are taken from it."""
        self.tokenizer = tokenizer
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self._watches: dict[int, StopWatch] = {}

    def admit(self, handle: int, request: Request, resume: Resume) -> None:
        """Begin, or go on with, a host-judged request."""
        watch = resume.watch
        if watch is None:
            stop_ids = request.stop_ids(self.eos_token_ids)
            too_many = len(stop_ids) > L.MAX_STOP_IDS  # else the gate finds them
            watch = StopWatch(request, resume.output_len, frozenset(stop_ids if too_many else ()))
        watch.request = request
        self._watches[handle] = watch

    def end(self, handle: int) -> StopWatch:
        """Forget a handle; what it remembered goes with the request's Resume."""
        return self._watches.pop(handle)

    def judge(self, conveyed: Conveyed, rows: Sequence[int], control: Control) -> None:
        """Look at the runs of `rows`, indices into `conveyed`, and write finish and hold to `control`."""
        token_ids = conveyed.token_ids
        for row in rows:
            start = int(conveyed.starts[row])
            run = token_ids[start : start + int(conveyed.accept_lens[row])].tolist()
            if not control.flags[row] & L.CONTROL_FINISH:
                self._look(self._watches[int(conveyed.handles[row])], run, row, control)

    def _look(self, watch: StopWatch, run: list[int], row: int, control: Control) -> None:
        request, before = watch.request, watch.length
        within = run[: max(request.max_new_tokens - before, 0)]
        if any(not 0 <= token < self.vocab_size for token in within):
            return  # the gate ends it there
        text = None
        for token in within if request.stop else ():
            text = watch.take(token, self.tokenizer)
            stop = next((stop for stop in request.stop if stop in text), None)
            if stop is not None:
                request.finish_reason = {"type": "stop", "matched": stop}
                control.finish(row, L.FINISH_STOP_STRING, finished_len=watch.length)
                return
        for place, token in enumerate(within if watch.stop_ids else ()):
            if token in watch.stop_ids:
                control.finish(row, L.FINISH_STOP_TOKEN, finished_len=before + place + 1, match=token)
                return
        watch.length = before + len(within)
        if text is None and watch.tokens:
            text = self.tokenizer.decode(watch.tokens, skip_special_tokens=False)
        if text and _could_begin(text, request.stop) and not control.flags[row] & L.CONTROL_FLUSH:
            control.flags[row] |= L.CONTROL_HOLD


def _could_begin(text: str, stops: Sequence[str]) -> bool:
    """Whether a text ends in what could become a stop string; of a character begun nothing is known yet."""
    known = text.rstrip(REPLACEMENT)
    begun = len(known) < len(text)
    return any(
        (begun and not stop[0].isascii()) or any(known.endswith(stop[:size]) for size in range(1, len(stop)))
        for stop in stops
    )
