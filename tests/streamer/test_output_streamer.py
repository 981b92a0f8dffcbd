"""OutputStreamer over a real socket: SPEC.md section 4 as far as it concerns messages, stop strings and aborts."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from gpupack.core import layout as L
from gpupack.core.config import EmitPolicy, PackerConfig
from gpupack.core.errors import BackpressureError, ClosedError, ConfigError, InputError
from gpupack.core.request import Request
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.streamer.output_streamer import OutputStreamer
from gpupack.text.stop_strings import StopStringJudge
from gpupack.transport.receiver import Delta, OutputReceiver
from gpupack.transport.sender import OutputSender

WORDS = ("<eos>", "ab", "W", "X", "YZ", "q", "UNO", "DUE", "TRE", "!!", "é", "WXYZW", "stop", "!")
IDS = {word: number for number, word in enumerate(WORDS)}
EOS = IDS["<eos>"]
TIMEOUT_MS = 5000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = {"é": "Ã©"}  # the byte-level spelling of the one character that is not ASCII
    vocab = {alphabet.get(word, word): number for word, number in IDS.items()}
    # Two halves of one character, each no text by itself.
    vocab |= {"Ã": len(WORDS), "©": len(WORDS) + 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


HALF_1, HALF_2 = len(WORDS), len(WORDS) + 1


class Line:
    """A packer, a streamer and a receiver at the two ends of a socket."""

    def __init__(self, tmp_path, tokenizer, **options) -> None:
        self.receiver = OutputReceiver(f"ipc://{tmp_path}/line")
        config = PackerConfig(
            vocab_size=100, eos_token_ids=(EOS,), **{"capacity": 8, "window": 64, "max_accept": 8} | options
        )
        judge = StopStringJudge(tokenizer, config)
        self.streamer = OutputStreamer(Packer(config), OutputSender(self.receiver.endpoint), judge=judge)

    def close(self) -> None:
        self.streamer.close()
        self.receiver.close()

    def step(self, handles, *runs, control: Control | None = None, logprobs=None) -> list[Delta]:
        """One step with a run of words or ids for each handle; the deltas that come of it."""
        ids = [[IDS.get(token, token) for token in run] for run in runs]
        width = max(map(len, ids))
        token_ids = np.zeros((len(ids), max(width, 1)), np.int64)
        for row, run in enumerate(ids):
            token_ids[row, : len(run)] = run
        accept_lens = np.array([len(run) for run in ids], np.int32)
        ticket = self.streamer.packer.step(
            np.asarray(handles, np.int64), token_ids, accept_lens=accept_lens, logprobs=logprobs, control=control
        )
        return self.send(ticket)

    def send(self, ticket, **options) -> list[Delta]:
        report = self.streamer.send(ticket, **options)
        if not report.frame_bytes:
            assert self.receiver.recv(20) is None
            return []
        step = self.receiver.recv(TIMEOUT_MS)
        assert step is not None
        assert step.frame.rows == report.rows
        return step.deltas()


@pytest.fixture
def line(tmp_path, tokenizer):
    made = []

    def make(**options) -> Line:
        made.append(Line(tmp_path, tokenizer, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def words(deltas: list[Delta]) -> list[list[str]]:
    return [[WORDS[token] for token in delta.token_ids] for delta in deltas]


def test_opening_record_goes_once_and_carries_the_prompt_tail(line):
    line = line()
    request = Request("r", [1, 2, 3, 4, 5, 6], http_worker_ipc="worker-3", decoded_text="so far", cached_tokens=4)
    handles = line.streamer.admit([request])
    (first,) = line.step(handles, ["ab"])
    assert (first.rid, first.token_ids, first.completion_tokens) == ("r", [IDS["ab"]], 1)
    assert (first.prompt_tokens, first.cached_tokens, first.finish_reason) == (6, 4, None)
    assert first.opening is not None
    assert (first.opening.prompt_tail, first.opening.worker, first.opening.decoded_text) == (
        [2, 3, 4, 5, 6],
        "worker-3",
        "so far",
    )
    (second,) = line.step(handles, ["q"])
    assert (second.token_ids, second.completion_tokens, second.opening) == ([IDS["q"]], 2, None)


def test_no_row_no_message_and_an_idle_batch_sends_zero_rows(line):
    line = line(stream_interval=4)
    handles = line.streamer.admit([Request(f"r{i}") for i in range(3)])
    line.step(handles, ["ab"], ["ab"], ["ab"])
    assert line.step(handles, ["q"], ["q"], ["q"]) == []
    ticket = line.streamer.packer.pack(np.empty(0, np.int64))
    report = line.streamer.send(ticket, idle=True)
    step = line.receiver.recv(TIMEOUT_MS)
    assert report.rows == step.frame.rows == 0
    assert step.frame.idle


STOPS = {
    # texts per step -> rows (words) per step, reason of the final row
    "completed across tokens": (["WXYZ"], ["ab", "W", "X", "YZ"], [["ab"], [], [], ["W", "X", "YZ"]], "WXYZ"),
    "begun and not completed": (["WXYZ"], ["ab", "W", "q"], [["ab"], [], ["W", "q"]], None),
    "held until the end of sequence": (
        ["TRE!!"],
        ["UNO", "DUE", "TRE", "<eos>"],
        [["UNO"], ["DUE"], [], ["TRE", "<eos>"]],
        EOS,
    ),
    "second of several": (["nothing", "é!"], ["é", "!"], [[], ["é", "!"]], "é!"),
    "inside one token": (["YZ"], ["ab", "WXYZW"], [["ab"], ["WXYZW"]], "YZ"),
    "the same beginning twice": (["WXYZ"], ["W", "W", "X", "YZ"], [[], [], [], ["W", "W", "X", "YZ"]], "WXYZ"),
}


@pytest.mark.parametrize("case", STOPS)
def test_stop_strings_hold_and_finish(line, case):
    stop, texts, rows, matched = STOPS[case]
    line = line()
    handles = line.streamer.admit([Request("r", stop=stop)])
    seen = [line.step(handles, [text]) for text in texts]
    assert [words(deltas)[0] if deltas else [] for deltas in seen] == rows
    reasons = [delta.finish_reason for deltas in seen for delta in deltas]
    assert reasons[-1] == (None if matched is None else {"type": "stop", "matched": matched})
    assert not any(reasons[:-1])


def test_a_character_in_two_tokens_completes_a_stop_string(line):
    line = line()
    handles = line.streamer.admit([Request("r", stop=["qé"])])
    assert words(line.step(handles, ["ab"])) == [["ab"]]
    assert line.step(handles, ["q"]) == []
    assert line.step(handles, [HALF_1]) == []
    (last,) = line.step(handles, [HALF_2])
    assert last.token_ids == [IDS["q"], HALF_1, HALF_2]
    assert last.finish_reason == {"type": "stop", "matched": "qé"}


def test_stop_string_inside_a_run_cuts_every_channel(line):
    line = line()
    handles = line.streamer.admit([Request("r", stop=["WXYZ"], return_logprob=True)])
    line.step(handles, ["ab", "q"], logprobs=np.array([[-0.5, -0.25]], np.float32))
    scores = np.array([[-1, -2, -3, -4, -5]], np.float32)
    (last,) = line.step(handles, ["W", "X", "YZ", "q", "q"], logprobs=scores)
    assert words([last]) == [["W", "X", "YZ"]]
    assert (last.completion_tokens, last.logprobs) == (5, [-1.0, -2.0, -3.0])
    assert last.finish_reason == {"type": "stop", "matched": "WXYZ"}


def test_a_stop_string_goes_before_end_of_sequence_and_ends_the_output(line):
    line = line()
    handles = line.streamer.admit([Request("r", stop=["qX"])])
    (last,) = line.step(handles, ["ab", "q", "X", "<eos>", "ab"])
    assert words([last]) == [["ab", "q", "X"]]
    assert last.finish_reason == {"type": "stop", "matched": "qX"}


def test_a_stop_string_beyond_the_cap_counts_as_length(line):
    line = line()
    handles = line.streamer.admit([Request("r", stop=["qX"], max_new_tokens=2)])
    (last,) = line.step(handles, ["ab", "q", "X"])
    assert words([last]) == [["ab", "q"]]
    assert last.finish_reason == {"type": "length", "length": 2}


def test_an_invalid_id_goes_before_a_stop_string(line):
    line = line()
    handles = line.streamer.admit([Request("bad", stop=["qX"]), Request("good")])
    bad, good = line.step(handles, ["q", "X", 100, "ab"], ["ab"])
    assert (words([bad]), bad.finish_reason["type"]) == ([["q", "X"]], "abort")
    assert "100" in bad.finish_reason["message"]
    assert (words([good]), good.finish_reason) == ([["ab"]], None)


def test_more_stop_ids_than_the_device_keeps(line):
    line = line()
    ids = list(range(50, 50 + L.MAX_STOP_IDS + 1))
    handles = line.streamer.admit([Request("r", stop_token_ids=ids)])
    assert words(line.step(handles, ["ab"])) == [["ab"]]
    (last,) = line.step(handles, ["q", ids[-1], "<eos>"])
    assert (last.token_ids, last.finish_reason) == ([IDS["q"], ids[-1]], {"type": "stop", "matched": ids[-1]})


def test_rows_of_both_kinds_keep_batch_order(line):
    line = line()
    kinds = [(), ("never",), (), ("never",), ()]
    handles = line.streamer.admit([Request(f"r{i}", stop=stop) for i, stop in enumerate(kinds)])
    order = np.array([3, 0, 4, 1, 2])
    deltas = line.step(handles[order], *([["ab"]] * 5))
    assert [delta.rid for delta in deltas] == [f"r{i}" for i in order]
    assert words(deltas) == [["ab"]] * 5


def test_engine_judged_requests_follow_the_control(line):
    line = line()
    requests = [Request("engine", judge="engine", max_new_tokens=1), Request("device")]
    handles = line.streamer.admit(requests)
    control = Control(2).reset(2)
    assert [d.finish_reason for d in line.step(handles, ["<eos>"], ["ab"], control=control)] == [None, None]
    control.flags[0] = L.CONTROL_HOLD
    assert [d.rid for d in line.step(handles, ["q"], ["ab"], control=control)] == ["device"]
    control.reset(2).finish(0, finished_len=2)
    requests[0].finish_reason = {"type": "stop", "matched": "grammar"}
    last, _ = line.step(handles, ["q"], ["ab"], control=control)
    assert (last.token_ids, last.completion_tokens) == ([IDS["q"]], 2)
    assert last.finish_reason == {"type": "stop", "matched": "grammar"}


ABORT = {"type": "abort", "message": "gone", "status_code": 499, "err_type": "ClientClosed"}


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["device-judged", "host-judged"])
def test_abort_sends_what_was_accepted_before_and_nothing_of_later(line, stop):
    line = line(stream_interval=8, max_in_flight=2)
    handles = line.streamer.admit([Request("r", stop=stop)])
    line.step(handles, ["ab"])
    assert line.step(handles, ["q"]) == []
    ticket = line.streamer.abort(handles, ABORT)
    later = line.streamer.packer.step(handles, np.array([IDS["X"]]))
    (last,) = line.send(ticket)
    assert (words([last]), last.completion_tokens, last.finish_reason) == ([["q"]], 2, ABORT)
    assert line.send(later) == []


def test_abort_after_everything_was_sent_gives_an_empty_final_row(line):
    line = line()
    handles = line.streamer.admit([Request("r")])
    line.step(handles, ["ab"])
    (last,) = line.send(line.streamer.abort(handles, ABORT))
    assert (last.token_ids, last.completion_tokens, last.finish_reason) == ([], 1, ABORT)


def test_abort_while_queued(line):
    line = line()
    handles = line.streamer.admit([Request("r", [7, 8])])
    (last,) = line.send(line.streamer.abort(handles, ABORT))
    assert (last.token_ids, last.completion_tokens, last.finish_reason) == ([], 0, ABORT)
    assert last.opening.prompt_tail == [7, 8]


def test_an_unnamed_end_of_the_engine_still_has_a_reason(line):
    line = line()
    handles = line.streamer.admit([Request("r", judge="engine")])
    control = Control(1).reset(1)
    control.finish(0)
    (last,) = line.step(handles, ["ab"], control=control)
    assert last.finish_reason["type"] == "abort"


@pytest.mark.parametrize("stop", [(), ("WXYZ",)], ids=["device-judged", "host-judged"])
def test_retraction_sends_every_token_once(line, stop):
    line = line(stream_interval=3)
    request = Request("r", stop=stop, return_logprob=True)

    def score(value):
        return np.array([value], np.float32)

    (handle,) = line.streamer.admit([request]).tolist()
    line.step([handle], ["ab"], logprobs=score(-1))
    assert line.step([handle], ["q"], logprobs=score(-2)) == []
    flying = line.streamer.packer.step(np.array([handle]), np.array([IDS["X"]]), logprobs=score(-9))
    resume = line.streamer.retract(handle, output_len=2)
    assert line.send(flying) == []
    assert (resume.output_len, resume.token_cursor, resume.unsent_tokens.tolist()) == (2, 1, [IDS["q"]])
    (handle,) = line.streamer.admit([request], [resume]).tolist()
    assert line.step([handle], ["X"], logprobs=score(-3)) == []
    (row,) = line.step([handle], ["ab"], logprobs=score(-4))
    assert (words([row]), row.logprobs) == ([["q", "X", "ab"]], [-2.0, -3.0, -4.0])
    assert (row.completion_tokens, row.restarted, row.opening.resumed) == (4, False, True)


@pytest.mark.parametrize("stop", [(), ("vw!",)], ids=["device-judged", "host-judged"])
def test_restart_that_drops_the_output_begins_anew(line, stop):
    line = line(stream_interval=3)
    request = Request("r", stop=stop, return_logprob=True)
    (handle,) = line.streamer.admit([request]).tolist()
    line.step([handle], ["ab", "q", "X"], logprobs=np.zeros((1, 3), np.float32))
    assert line.step([handle], ["W", "ab"], logprobs=np.zeros((1, 2), np.float32)) == []
    resume = line.streamer.retract(handle).dropped()
    (handle,) = line.streamer.admit([request], [resume]).tolist()
    run = ["UNO", "DUE", "TRE", "q", "ab"]
    (row,) = line.step([handle], run, logprobs=np.full((1, 5), -1, np.float32))
    assert (words([row]), row.logprobs, row.restarted) == ([run], [-1.0] * 5, True)
    assert row.completion_tokens == 5


def test_stop_string_across_a_retraction(line):
    line = line()
    request = Request("r", stop=["WXYZ"])
    (handle,) = line.streamer.admit([request]).tolist()
    assert line.step([handle], ["W"]) == []
    resume = line.streamer.retract(handle)
    (handle,) = line.streamer.admit([request], [resume]).tolist()
    assert line.step([handle], ["X"]) == []
    (last,) = line.step([handle], ["YZ"])
    assert words([last]) == [["W", "X", "YZ"]]


def test_slots_are_used_again_and_old_handles_change_nothing(line):
    line = line(capacity=1)
    (old,) = line.streamer.admit([Request("old", max_new_tokens=1)]).tolist()
    (last,) = line.step([old], ["ab"])
    assert last.finish_reason == {"type": "length", "length": 1}
    line.streamer.retire(np.array([old]))
    (new,) = line.streamer.admit([Request("new")]).tolist()
    assert new & 0xFFFFFFFF == old & 0xFFFFFFFF
    assert line.step([old], ["q"]) == []
    (row,) = line.step([new], ["X"])
    assert (row.rid, words([row])) == ("new", [["X"]])
    assert line.streamer.metrics.snapshot()["stale_rows"] == 1


def test_a_dropped_request_is_closed_at_the_receiver(line):
    line = line()
    first, second = line.streamer.admit([Request("first"), Request("second")]).tolist()
    line.step([first, second], ["ab"], ["ab"])
    line.streamer.retire(np.array([first]))
    line.step([second], ["q"])
    (again,) = line.streamer.admit([Request("first")]).tolist()
    (row,) = line.step([again], ["q"])
    assert (row.rid, row.completion_tokens, row.opening.resumed) == ("first", 1, False)


def test_a_finished_request_cannot_be_retracted(line):
    line = line()
    requests = [Request("device", max_new_tokens=1), Request("host", stop=["q"])]
    handles = line.streamer.admit(requests)
    line.step(handles, ["ab"], ["q"])
    for handle in handles.tolist():
        with pytest.raises(InputError, match="has sent its final row"):
            line.streamer.retract(handle)


def test_host_judged_needs_a_judge(line):
    line = line()
    line.streamer.judge = None
    with pytest.raises(InputError, match="judge: r is host-judged, expected a StopStringJudge"):
        line.streamer.admit([Request("r", stop=["x"])])
    assert len(line.streamer.packer.slots) == 0


def test_presets_send_empty_rows_of_host_judged_requests_too(line):
    line = line(policy=EmitPolicy.sglang_0_5_23())
    handles = line.streamer.admit([Request("device"), Request("host", stop=["never"])])
    assert [d.token_ids for d in line.step(handles, [], [])] == [[], []]


# --- What a review found ----------------------------------------------------------------------------


def test_a_flush_of_text_that_could_begin_a_stop_string_disturbs_nobody(line):
    line = line()
    handles = line.streamer.admit([Request("engine", judge="engine"), Request("host", stop=["WXYZ"])])
    control = Control(2).reset(2)
    control.flags[:] = L.CONTROL_FLUSH
    assert words(line.step(handles, ["ab"], ["W"], control=control)) == [["ab"], ["W"]]


def test_an_end_beyond_the_output_is_the_outputs_end(line):
    line = line()
    handles = line.streamer.admit([Request("engine", judge="engine"), Request("other")])
    control = Control(2).reset(2)
    control.finish(0, finished_len=99)
    last, other = line.step(handles, ["ab", "q"], ["X"], control=control)
    assert (words([last]), last.completion_tokens, words([other])) == ([["ab", "q"]], 2, [["X"]])


def test_output_that_the_engine_keeps_back_past_the_window_is_shown(line):
    line = line(window=16, max_accept=8)
    (handle,) = line.streamer.admit([Request("engine", judge="engine")]).tolist()
    control = Control(1).reset(1)
    control.visible_len[:] = 0
    got = []
    for _ in range(12):
        got += [token for delta in line.step([handle], ["ab"], control=control) for token in delta.token_ids]
    assert len(got) == 12 - (16 - 8)
    control.reset(1).finish(0)
    (last,) = line.step([handle], ["q"], control=control)
    assert len(got) + len(last.token_ids) == last.completion_tokens == 13


def test_an_idle_batch_that_has_rows_sends_them(line):
    line = line()
    handles = line.streamer.admit([Request("r")])
    ticket = line.streamer.packer.step(handles, np.array([IDS["ab"]]))
    assert words(line.send(ticket, idle=True)) == [["ab"]]


def test_a_control_can_be_used_again_under_the_overlap_schedule(line):
    line = line(max_in_flight=2)
    handles = line.streamer.admit([Request("r", judge="engine")])
    control = Control(1).reset(1)
    first = line.streamer.packer.step(handles, np.array([IDS["ab"]]), control=control)
    control.reset(1).finish(0)
    second = line.streamer.packer.step(handles, np.array([IDS["q"]]), control=control)
    assert [d.finish_reason for d in line.send(first)] == [None]
    (last,) = line.send(second)
    assert (words([last]), last.completion_tokens) == ([["q"]], 2)


def test_a_stop_string_that_is_a_special_token(line):
    line = line()
    handles = line.streamer.admit([Request("r", stop=["<eos>"], ignore_eos=True)])
    line.step(handles, ["ab"])
    (last,) = line.step(handles, ["<eos>"])
    assert last.finish_reason == {"type": "stop", "matched": "<eos>"}


def test_a_stop_string_of_byte_tokens_ends_at_its_token(tmp_path):
    vocab = {"<unk>": 0, "<eos>": 1, "▁ab": 2, "<0x0A>": 3, "q": 4, "<0xC3>": 5, "<0xA9>": 6}
    llama = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    llama.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for run, stop in (([2, 3], "\n"), ([2, 3, 3], "\n\n"), ([2, 5, 6], "é")):
        line = Line(tmp_path, llama)
        handles = line.streamer.admit([Request("r", stop=[stop])])
        got = [delta for token in run for delta in line.step(handles, [token])]
        assert [token for delta in got for token in delta.token_ids] == run
        assert got[-1].finish_reason == {"type": "stop", "matched": stop}
        line.close()


def test_a_second_retraction_before_the_restarted_row_still_restarts(line):
    line = line()
    request = Request("r")
    (handle,) = line.streamer.admit([request]).tolist()
    line.step([handle], ["ab", "q"])
    resume = line.streamer.retract(handle).dropped()
    (handle,) = line.streamer.admit([request], [resume]).tolist()
    resume = line.streamer.retract(handle)
    assert (resume.restarted, resume.restarts) == (True, 1)
    (handle,) = line.streamer.admit([request], [resume]).tolist()
    (row,) = line.step([handle], ["X"])
    assert (row.restarted, row.completion_tokens) == (True, 1)


BAD_REQUESTS = {
    "rid: expected": dict(rid="lone \ud800 surrogate"),
    "prompt_ids, stop_token_ids, stop, token_ids_logprob of r: expected sequences": dict(prompt_ids=None),
    "prompt_ids of r: expected integers of 32 bits": dict(prompt_ids=[2**40]),
    "stop_token_ids of r: expected integers of 32 bits": dict(stop_token_ids=[2**40]),
    "http_worker_ipc of r: expected a string": dict(http_worker_ipc=["w"]),
    "decoded_text of r: expected a string": dict(decoded_text=None),
    "skip_special_tokens of r: expected True or False": dict(skip_special_tokens=None),
    "stop of r: expected a sequence of non-empty": dict(stop="text"),
}


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_a_request_that_could_not_travel_is_refused(message):
    with pytest.raises(InputError, match=message):
        Request(**{"rid": "r"} | BAD_REQUESTS[message])


def test_a_reason_that_cannot_travel(line):
    line = line()
    handles = line.streamer.admit([Request("r", judge="engine")])
    with pytest.raises(InputError, match="reason: expected a dict with a type"):
        line.streamer.abort(handles, {"matched": [1, 2]})
    assert len(line.streamer.packer.in_flight) == 0
    line.streamer.packer.slots.request(int(handles[0])).finish_reason = {"type": "stop", "matched": np.int64(3)}
    control = Control(1).reset(1)
    control.finish(0)
    (last,) = line.step(handles, ["ab"], control=control)
    assert last.finish_reason["err_type"] == "Aborted"


def test_an_abort_does_not_rename_an_end_that_was_launched_before(line):
    line = line(max_in_flight=2)
    request = Request("r", judge="engine")
    handles = line.streamer.admit([request])
    request.finish_reason = {"type": "stop", "matched": "grammar"}
    control = Control(1).reset(1)
    control.finish(0)
    ended = line.streamer.packer.step(handles, np.array([IDS["ab"]]), control=control)
    aborted = line.streamer.abort(handles, ABORT)
    assert [d.finish_reason for d in line.send(ended)] == [{"type": "stop", "matched": "grammar"}]
    assert line.send(aborted) == []


def test_the_judge_leaves_an_end_alone_that_append_found(line):
    line = line()
    handles = line.streamer.admit([Request("r", stop=["YZ", "q"])])
    packer = line.streamer.packer
    for word in ("YZ", "q"):
        assert line.send(packer.append(handles, np.array([IDS[word]]))) == []
    with pytest.raises(InputError, match="has finished; pack sends its row"):
        line.streamer.retract(int(handles[0]))
    (last,) = line.send(packer.pack(handles))
    assert (words([last]), last.finish_reason) == ([["YZ"]], {"type": "stop", "matched": "YZ"})


def test_retracting_what_the_gate_judges_counts_what_was_taken_in(line):
    line = line()
    (handle,) = line.streamer.admit([Request("r", stop=["WXYZ"])]).tolist()
    line.step([handle], ["ab"])
    with pytest.raises(InputError, match="output_len: expected the 1 tokens taken in, got 2"):
        line.streamer.retract(handle, output_len=2)
    with pytest.raises(InputError, match="is host-judged"):
        line.streamer.packer.retract(handle)
    assert words(line.step([handle], ["q"])) == [["q"]]


def test_logprob_columns_are_absent_from_a_mixed_batch_that_returns_none(line):
    line = line()
    handles = line.streamer.admit([Request(n, stop=s, return_logprob=True) for n, s in (("a", ()), ("b", ("W",)))])
    scores = np.zeros((2, 1), np.float32)
    ticket = line.streamer.packer.step(handles, np.array([1, 5]), logprobs=scores, return_logprob=False)
    assert [delta.logprobs for delta in line.send(ticket)] == [None, None]


def test_stale_rows_count_when_every_other_row_is_host_judged(line):
    line = line()
    gone, kept = line.streamer.admit([Request("gone"), Request("kept", stop=["W"])]).tolist()
    line.streamer.retire(np.array([gone]))
    line.step([gone, kept], ["ab"], ["ab"])
    assert line.streamer.metrics.snapshot()["stale_rows"] == 1


def test_what_goes_wrong_behind_the_take_in_closes_the_packer(line):
    line = line()
    handles = line.streamer.admit([Request("r", stop=["W"])])

    class Broken:
        def judge(self, *_):
            raise RuntimeError("the tokenizer broke")

    line.streamer.judge, judge = Broken(), line.streamer.judge
    with pytest.raises(RuntimeError, match="the tokenizer broke"):
        line.step(handles, ["ab"])
    line.streamer.judge = judge
    with pytest.raises(ClosedError):
        line.step(handles, ["ab"])


def test_a_step_that_no_frame_can_hold_is_refused_at_the_start(tmp_path):
    with (
        OutputReceiver(f"ipc://{tmp_path}/small") as receiver,
        OutputSender(receiver.endpoint, max_frame_bytes=4096) as sender,
        pytest.raises(ConfigError, match="max_frame_bytes: the fullest step needs"),
    ):
        OutputStreamer(Packer(PackerConfig(vocab_size=10, capacity=64)), sender)


def test_backpressure_says_what_the_step_finished(tmp_path):
    config = PackerConfig(vocab_size=100, capacity=4, window=16)
    with OutputReceiver(f"ipc://{tmp_path}/slow", high_water_mark=1) as receiver:
        sender = OutputSender(receiver.endpoint, max_pending_bytes=0, send_timeout_ms=1, high_water_mark=1)
        streamer = OutputStreamer(Packer(config), sender)
        handles = streamer.admit([Request("ends", max_new_tokens=4000), Request("stays")])
        finished = []
        sent = 0
        while not finished:
            ticket = streamer.packer.step(handles, np.array([1, 2]))
            sent += 1
            try:
                finished += streamer.send(ticket).finished.tolist()
            except BackpressureError as error:
                finished += error.report.finished.tolist()
        assert finished == handles[:1].tolist()
        tokens = {"ends": 0, "stays": 0}
        while tokens["ends"] < 4000:
            sender.flush(100)
            step = receiver.recv(TIMEOUT_MS)
            for delta in step.deltas():
                tokens[delta.rid] += len(delta.token_ids)
        assert sent == 4000
        streamer.close()


def test_metrics_count_what_was_sent(line):
    line = line()
    handles = line.streamer.admit([Request("a", max_new_tokens=2), Request("b", stop=["W"])])
    line.step(handles, ["ab"], ["ab"])
    line.step(handles, ["ab"], ["q", "W"])
    counted = line.streamer.metrics.snapshot()
    assert (counted["steps"], counted["frames"], counted["rows"], counted["tokens"]) == (2, 2, 4, 5)
    assert counted["finished"] == 2
    assert counted["frame_bytes"] > 0
