"""Detokenizer: the text of all requests of a receiver, a TextStream each (extra `detok`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from gpupack.core.errors import DetokenizerError
from gpupack.text.text_stream import TextStream, Vocabulary

_FLAGS = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a request; `reset` says that all its earlier text is void."""

    rid: str
    text: str
    reset: bool
    finish_reason: dict[str, Any] | None


class Detokenizer:
    """One TextStream per request: opens on first sight, drops at the final delta."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)
        self._streams: dict[str, TextStream] = {}

    def __len__(self) -> int:
        """Number of requests that are open."""
        return len(self._streams)

    def push(self, delta: Any) -> TextDelta:
        """Takes a delta and returns its text; with a finish reason the request is forgotten.

        A delta has `rid`, `token_ids`, `finish_reason`, `restarted` and `opening`: none except on the first, where it
        has `resumed`, `prompt_tail`, `skip_special_tokens`, `spaces_between_special_tokens` and `no_stop_trim`.
        An opening that resumes a request goes on with its text; any other begins a request of that name anew.
        Raises DetokenizerError for an unknown request without opening and for a token id outside 0 to 2**32 - 1.
        """
        stream, reset = self._stream(delta)
        if delta.finish_reason is None:
            text = stream.push(delta.token_ids)
            self._streams[delta.rid] = stream
        else:
            text = stream.finish(delta.token_ids, delta.finish_reason)
            self._streams.pop(delta.rid, None)
        return TextDelta(delta.rid, text, reset, delta.finish_reason)

    def drop(self, rid: str) -> None:
        """Forgets a request whose final delta will not come (`ReceivedStep.dropped`); does nothing if it is unknown."""
        self._streams.pop(rid, None)

    def _stream(self, delta: Any) -> tuple[TextStream, bool]:
        """The stream that a delta belongs to, and whether the text shown before is void."""
        stream, opening = self._streams.get(delta.rid), delta.opening
        if opening is not None and not (opening.resumed and stream is not None):
            flags = {n: getattr(opening, n) for n in _FLAGS}
            opened = TextStream(self._tokenizer, opening.prompt_tail, **flags, _vocabulary=self._vocabulary)
            return opened, delta.restarted or stream is not None
        if stream is None:
            raise DetokenizerError(f"request {delta.rid!r} is unknown; expected an opening with its first delta")
        if delta.restarted:
            stream.restart()
        return stream, delta.restarted
