"""TextStream: incremental text from the token deltas of one request (extra `detok`; `tokenizers` 0.22 or newer).

The text of a request is defined by one full decode: `decode(tail + output)`, where `tail` is the prompt tail, without
what it has in common, at the front, with `decode(tail)`. For byte-level BPE this is `decode(output)`; elsewhere the
tail decides whether there is a leading space. If the tail ends inside a character, the character belongs to the output
if the output completes it, and to the prompt if it stays broken.

`DecodeStream` does the stepping. Added here: text at the end, a bounded window (it keeps every token while the text
ends in U+FFFD), recovery from its "Invalid prefix" error, byte runs, stop trimming. A byte-fallback decoder turns a
whole run of byte tokens into U+FFFD if any of it is broken, so nothing of a run is shown until another token ends it.
That makes shown text final for byte-level, byte-fallback, Metaspace, WordPiece and BPE-suffix decoders. If a decoder
rewrites shown text all the same (say, by a Replace that spans tokens), what differs from it is shown behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gpupack.core.errors import DetokenizerError

# A valid character has at most 4 bytes, so more unshown tokens than this mean broken bytes or tokens without text.
_MAX_PENDING = 8
# Tokens kept as context. An unfinished character has at most 3 bytes, and its first one is right in any context.
_CONTEXT = 4
_BROKEN = "\ufffd"


class Vocabulary:
    """What decoding does to single tokens; read once per tokenizer, so tokens added to it later are not seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token = tokenizer.id_to_token
        self.special = frozenset(t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special)
        decoder = tokenizer.decoder
        self.joins_bytes = decoder is not None and "<0x" not in decoder.decode(["<0x41>"])

    def kept(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """The ids that decoding does not drop: those of no token and skipped special ones never matter again."""
        dropped = self.special if skip_special_tokens else frozenset[str]()
        try:
            return [i for i in token_ids if (t := self.token(i)) is not None and t not in dropped]
        except OverflowError as error:
            bad = [i for i in token_ids if not 0 <= i < 2**32]
            raise DetokenizerError(f"expected token ids from 0 to 2**32 - 1, got {bad}") from error

    def settled(self, token_ids: list[int]) -> int:
        """How many of the ids come before a trailing run of byte tokens, whose text depends on what follows."""
        count = len(token_ids)
        # Too much is no harm: a token that only looks like a byte waits for the next one.
        while self.joins_bytes and count and (self.token(token_ids[count - 1]) or "").startswith("<0x"):
            count -= 1
        return count


class TextStream:
    """Text of one request, built from its deltas.

    The chunks of all calls, joined, are the text defined at the top of this module, with the stop cut off. No chunk
    before the last shows a partial character.

    Parameters
    ----------
    prompt_tail : last tokens of the prompt; ids outside 0 to 2**32 - 1 (multimodal placeholders) have no text.
    skip_special_tokens : leave special tokens out of the text.
    spaces_between_special_tokens : no effect. Rows carry it, but only slow tokenizers knew it: `tokenizers` has no
        such choice, and transformers drops it for fast ones.
    no_stop_trim : keep a matched stop token or stop string. Text behind the string is cut all the same, as in SGLang.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        no_stop_trim: bool = False,
        _vocabulary: Vocabulary | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = _vocabulary or Vocabulary(tokenizer)
        self._skip = skip_special_tokens
        self._no_stop_trim = no_stop_trim
        self._tail = self._kept([i for i in prompt_tail if 0 <= i < 2**32])
        self._ended = False
        self._shown: list[str]
        self._run: list[int]  # trailing byte tokens, not given to the stream yet
        self._begin()

    @property
    def text(self) -> str:
        """All that was shown so far (since the last restart)."""
        return "".join(self._shown)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes a delta and returns the text that may be shown now, perhaps none.

        Raises DetokenizerError after the finish, or (nothing is changed then) for an id outside 0 to 2**32 - 1.
        """
        self._check_open()
        ids = self._kept(token_ids)
        settled = self._vocabulary.settled(ids)
        if settled == 0:
            self._run += ids
            return ""
        feed, self._run = self._run + ids[:settled], ids[settled:]
        return self._show(self._feed(feed))

    def finish(self, token_ids: Sequence[int], finish_reason: dict[str, Any] | None) -> str:
        """Takes the last delta and returns all text that is left; a broken character at the end becomes U+FFFD.

        A finish reason of type "stop" has its `matched` trimmed: a token id means that the last token is not decoded,
        a string that the text is cut where it is found. Shown text stays. Other types, and none, trim nothing.
        Raises DetokenizerError like `push`.
        """
        self._check_open()
        matched = finish_reason.get("matched") if finish_reason and finish_reason.get("type") == "stop" else None
        trim_token = isinstance(matched, int) and not self._no_stop_trim
        ids = self._kept(token_ids[:-1] if trim_token else token_ids)
        held = self._run or self._pending
        if trim_token and len(token_ids) == 0 and held and held[-1] == matched:
            held.pop()  # the stop token came with an earlier delta
        rest = self._rest(ids)
        if isinstance(matched, str) and matched:
            rest = self._cut(rest, matched, ids)
        self._ended = True
        return self._show(rest)

    def restart(self) -> None:
        """Discards all tokens and text, and begins anew behind the same prompt. Raises DetokenizerError at the end."""
        self._check_open()
        self._begin()

    def _begin(self) -> None:
        self._shown = []
        self._run = []
        self._open(self._tail, self._decode(self._tail))

    def _open(self, window: list[int], lead: str) -> None:
        """Starts a DecodeStream on a window of tokens of whose text `lead` was shown or is the prompt's.

        The window goes in with the first step and `lead` comes off what comes out. `DecodeStream(ids=window)` would put
        out a window that ends in U+FFFD as new text (vllm-project/vllm#48853).
        """
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._unfed = list(window)
        self._anchor = list(window)  # tokens before the pending ones; the stream keeps the same two
        self._pending: list[int] = []  # tokens given to the stream since it last put out text
        self._lead: str | None = lead  # none once the stream has put out text: it takes off the anchor's itself

    def _feed(self, ids: list[int]) -> str:
        """Steps the stream; every id survives decoding and the last one ends a byte run. Returns new text."""
        self._pending += ids
        feed, self._unfed = self._unfed + ids, []
        try:
            text = self._stream.step(self._tokenizer, feed)
        except Exception as error:  # what tokenizers raises; the message is all that tells the causes apart
            if not str(error).startswith("Invalid prefix"):
                raise
            return self._rebase()
        if text is None:
            return self._rebase() if len(self._pending) > _MAX_PENDING else ""
        if self._lead is not None:
            text, self._lead = self._unshown(text), None
        self._anchor, self._pending = self._pending, []
        return text

    def _rebase(self) -> str:
        """Returns the settled text of what the stream holds, and goes on with a new stream over the last tokens.

        Only the last U+FFFD can still become a character. The new window may begin inside a character: what that does
        to its front is part of its lead.
        """
        window = self._anchor + self._pending
        whole = self._decode(window)
        text = self._unshown(whole.removesuffix(_BROKEN))
        unsettled = self._unshown(whole)[len(text) :]
        window = window[-_CONTEXT:]
        self._open(window, self._decode(window).removesuffix(unsettled))
        return text

    def _rest(self, ids: list[int]) -> str:
        """Text not shown yet if the output ended with `ids`."""
        return self._unshown(self._decode(self._anchor + self._pending + self._run + ids))

    def _unshown(self, text: str) -> str:
        """Takes the text of the anchor off a text of anchor and more."""
        lead = self._decode(self._anchor) if self._lead is None else self._lead
        return text[_common(lead, text) :]

    def _cut(self, rest: str, stop: str, ids: list[int]) -> str:
        """Cuts `rest`, all text left, at the stop string; `ids` are the last delta's.

        The output ends at the token that completed the string, so the earliest occurrence that ends in that token's
        text is meant. Failing that, one that ends in the last delta, or, as in SGLang, the first of all.
        """
        shown = self.text
        text = shown + rest
        start = -1
        for before in (self._rest(ids[:-1]), self._rest([])):
            floor = len(shown) + _common(before, rest) - len(stop) + 1
            start = text.find(stop, max(0, floor)) if start < 0 else start
        start = text.find(stop) if start < 0 else start
        if start < 0:
            return rest
        end = start + len(stop) if self._no_stop_trim else start
        return rest[: max(0, end - len(shown))]

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    def _kept(self, token_ids: Sequence[int]) -> list[int]:
        return self._vocabulary.kept(token_ids, self._skip)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _check_open(self) -> None:
        if self._ended:
            raise DetokenizerError("the text of this request has ended; expected no call after finish()")


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    if b.startswith(a):
        return len(a)
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
