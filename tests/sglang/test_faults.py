"""What is wrong in the real streamer (SPEC.md section 4): it shows it, our preset shows it, our default does not."""

from __future__ import annotations

import pytest
from life import Part
from real import NEWER, Setting
from trio import Trio, make, take

from gpupack.core.layout import ROW_RESTARTED


def rows_at(folder, lengths, *, stream=True, interval=4, verify=False):
    """Output lengths at which each of the three sends a row; the last one finishes."""
    req = make("a", stream=stream, stream_interval=interval, max_new_tokens=lengths[-1])
    at = [[], [], []]
    with Trio(Setting(speculative=verify), folder) as trio:
        for length in lengths:
            tokens = list(range(100 + len(req.output_ids), 100 + length))
            rows = trio.step(take(req, *tokens), verify=verify)
            for seen, row in zip(at, rows, strict=True):
                seen += [length] if row else []
    return at


def test_one_token_a_step_is_sent_by_interval_by_all(tmp_path):
    real, preset, default = rows_at(tmp_path, list(range(1, 11)))
    assert real == preset == default == [1, 5, 9, 10]


def test_runs_step_over_the_lengths_that_the_modulo_rule_waits_for(tmp_path):
    real, preset, default = rows_at(tmp_path, [1, 4, 8, 12, 16, 20], verify=True)
    assert default == [1, 8, 12, 16, 20]
    assert real == preset == (default if NEWER else [1, 20])


def test_the_first_tokens_wait_for_a_length_of_the_modulo_rule(tmp_path):
    real, preset, default = rows_at(tmp_path, [3, 6, 9, 12, 13], verify=True)
    assert default == [3, 9, 13]
    assert real == preset == (default if NEWER else [9, 13])


def test_forced_sends_wait_for_a_multiple_of_the_interval(tmp_path):
    lengths = list(range(1, 421, 7))
    real, preset, default = rows_at(tmp_path, lengths, stream=False, verify=True)
    assert real == preset == [50, 400, lengths[-1]]
    assert default == [50, 106, 162, 218, 274, 330, 386, lengths[-1]]


def test_a_row_before_the_first_token_loses_its_logprob(tmp_path):
    req = make("a", return_logprob=True)
    with Trio(Setting(), tmp_path) as trio:
        empty = trio.step(Part(req), return_logprob=True)
        assert [row.logprobs for row in empty.real] == [row.logprobs for row in empty.preset] == [[]]
        assert empty.default is None
        first = trio.step(take(req, 40), return_logprob=True)
        assert first.real == first.preset
        assert first.real[0].logprobs == []
        assert first.default[0].logprobs == [-1.0]
        assert [row[0].output_ids for row in first] == [[40]] * 3


def test_a_retracted_request_keeps_its_first_logprob_where_the_package_does(tmp_path):
    req = make("a", return_logprob=True)
    req.reset_for_retract()
    with Trio(Setting(), tmp_path) as trio:
        empty = trio.step(Part(req), return_logprob=True)
        assert empty.real == empty.preset
        assert empty.default is None
        req.is_retracted = False
        first = trio.step(take(req, 40), return_logprob=True)
        assert first.real == first.preset
        assert first.real[0].logprobs == ([-1.0] if NEWER else [])
        assert first.default[0].logprobs == [-1.0]


def test_a_step_that_accepts_nothing_sends_an_empty_row(tmp_path):
    reqs = [make(f"r{i}") for i in range(4)]
    with Trio(Setting(speculative=True), tmp_path) as trio:
        trio.step(*(take(req, 1) for req in reqs), verify=True)
        parts = [take(reqs[i], *range(10, 10 + n)) if n else Part(reqs[i]) for i, n in enumerate((3, 1, 0, 2))]
        rows = trio.step(*parts, verify=True)
        assert rows.real == rows.preset
        assert [len(row.output_ids) for row in rows.real] == [3, 1, 0, 2]
        assert [len(row.output_ids) for row in rows.default] == [3, 1, 2]


def test_forced_sends_do_not_look_at_the_hold(tmp_path, words):
    stop = words.encode(" WXYZ")
    req = make("a", words, stream=False, stop=["WXYZ and more"])
    filler = words.encode(" and")[0]
    with Trio(Setting(), tmp_path) as trio:
        for _ in range(50 - len(stop)):
            assert trio.step(take(req, filler)) == (None, None, None)
        for token in stop[:-1]:
            assert trio.step(take(req, token)) == (None, None, None)
        held = trio.step(take(req, stop[-1]))
        assert req.check_match_stop_str_prefix()
        assert held.real == held.preset
        assert len(held.real[0].output_ids) == 50
        assert held.default is None
        freed = trio.step(take(req, words.encode(" the")[0]))
        assert freed.default[0].completion_tokens == 51


def test_output_that_a_restart_drops_is_sent_again_only_by_us(tmp_path):
    req = make("a")
    req.input_embeds = [[0.0]]
    with Trio(Setting(), tmp_path) as trio:
        for token in (1, 2, 3):
            trio.step(take(req, token))
        req.reset_for_retract()
        entry = trio.default.known["a"]
        entry.resume, entry.handle = trio.default.streamer.retract(entry.handle).dropped(), -1
        req.is_retracted = False
        real, ours, restarted = [], [], []
        for token in range(11, 16):
            rows = trio.step(take(req, token))
            real += rows.real[0].output_ids
            ours += rows.default[0].output_ids
            restarted += [bool(trio.default.newest.frame.flags[0] & ROW_RESTARTED)]
    assert real == [12, 13, 14, 15]  # the cursor stood at 3, and its first row moved it to 1
    assert ours == [11, 12, 13, 14, 15]
    assert restarted == [True, False, False, False, False]


@pytest.mark.parametrize("stream", [True, False])
def test_a_finished_request_that_is_seen_again_sends_nothing(tmp_path, stream):
    req = make("a", stream=stream, max_new_tokens=1)
    with Trio(Setting(), tmp_path) as trio:
        rows = trio.step(take(req, 9))
        assert [row[0].finished for row in rows] == [True] * 3
        assert trio.step(Part(req, stray=10)) == (None, None, None)
