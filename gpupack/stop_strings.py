"""StopStringJudge: finish and hold of requests with stop strings, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpupack import layout as L
from gpupack.control import Control
from gpupack.gate import Conveyed
from gpupack.request import NO_LIMIT, Request, Resume

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class _Watch:
    """What is remembered of one request: its text as the receiver shows it, cut to the longest stop string."""

    __slots__ = ("length", "reach", "request", "stop_ids", "stream", "tail")

    def __init__(self, tokenizer: Tokenizer, request: Request, length: int, stop_ids: frozenset[int]) -> None:
        from gpupack.detokenizer import TextStream

        self.request = request
        self.stream = TextStream(
            tokenizer,
            request.prompt_tail,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
        )
        self.length = length
        self.tail = ""
        self.reach = max((len(text) for text in request.stop), default=0)
        self.stop_ids = stop_ids

    def completed(self, token_id: int) -> str | None:
        """Take in one token; the stop string that it completes, if any."""
        text = self.tail + self.stream.push([token_id])
        self.length += 1
        self.tail = text[max(len(text) - self.reach + 1, 0) :] if self.reach else ""
        return next((stop for stop in self.request.stop if stop in text), None)

    def could_begin(self) -> bool:
        """Whether the text ends in what could become a stop string."""
        return any(
            self.tail.endswith(stop[:size])
            for stop in self.request.stop
            for size in range(1, min(len(stop) - 1, len(self.tail)) + 1)
        )


class StopStringJudge:
    """Finds stop strings in the text of host-judged requests and holds what could begin one.

    The order is SPEC.md section 2's: an invalid id goes before a stop string, which goes before stop
    ids and length; a stop string completed beyond `max_new_tokens` counts as length. Invalid ids,
    length and the stop ids that fit the state are the gate's own business. Costs Python work for each
    request with a stop string and step, and nothing for others.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._watches: dict[int, _Watch] = {}
        self._parked: dict[str, _Watch] = {}

    def admit(self, handle: int, request: Request, resume: Resume) -> None:
        """Begin, or go on with, a host-judged request."""
        watch = self._parked.pop(request.rid, None)
        if watch is None or resume.restarted or watch.length != resume.output_len:
            stop_ids = request.stop_ids(self.eos_token_ids)
            too_many = len(stop_ids) > L.MAX_STOP_IDS  # else the gate finds them
            watch = _Watch(self.tokenizer, request, resume.output_len, frozenset(stop_ids if too_many else ()))
        watch.request = request
        self._watches[handle] = watch

    def end(self, handle: int, *, resumable: bool = False) -> None:
        """Forget a handle; with `resumable` its text is kept until the request comes back."""
        watch = self._watches.pop(handle, None)
        if watch is not None and resumable:
            self._parked[watch.request.rid] = watch

    def forget(self, rid: str) -> None:
        """Drop the text of a retracted request that will not come back."""
        self._parked.pop(rid, None)

    def judge(self, conveyed: Conveyed, rows: Sequence[int], control: Control) -> None:
        """Look at the runs of `rows`, indices into `conveyed`, and write finish and hold to `control`."""
        token_ids = conveyed.token_ids
        for row in rows:
            watch = self._watches[int(conveyed.handles[row])]
            start = int(conveyed.starts[row])
            run = token_ids[start : start + int(conveyed.accept_lens[row])].tolist()
            if not control.flags[row] & L.CONTROL_FINISH:
                self._look(watch, run, row, control)

    def _look(self, watch: _Watch, run: list[int], row: int, control: Control) -> None:
        request = watch.request
        before = watch.length
        cap = request.max_new_tokens
        within = run[: max(cap - before, 0)] if cap < NO_LIMIT else run
        if any(not 0 <= token < self.vocab_size for token in within):
            return  # the gate ends it there
        for token in within:
            stop = watch.completed(token)
            if stop is not None:
                request.finish_reason = {"type": "stop", "matched": stop}
                control.finish(row, L.FINISH_STOP_STRING, finished_len=watch.length)
                return
        for place, token in enumerate(within):
            if token in watch.stop_ids:
                control.finish(row, L.FINISH_STOP_TOKEN, finished_len=before + place + 1, match=token)
                return
        if watch.could_begin():
            control.flags[row] |= L.CONTROL_HOLD
