"""The demo end to end: real processes, a real socket, the real model; and the command line."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpupack.core.config import PackerConfig
from gpupack.demo.prompts import PROMPTS, Prompt
from gpupack.demo.receiver_process import ReceiverProcess
from gpupack.demo.verify import expected_output
from gpupack.packer.packer import Packer
from gpupack.streamer.output_streamer import OutputStreamer
from gpupack.text.stop_strings import StopStringJudge
from gpupack.transport.sender import OutputSender

COMMAND = Path(sys.executable).with_name("gpupack")
MAX_LEN = 128

GREEDY = (
    Prompt("sky", "Why is the sky blue?", 24),
    Prompt("france", "What is the capital of France?", 24, 4),
    Prompt("fruits", "List three fruits.", 20, 1, stop=("healthy and bal",)),
    Prompt("hello", "Say hello.", 1),
    Prompt("bicycle", "Explain in plain words how a bicycle stays upright.", 24, 6, stream=False),
)


def run(*arguments: str, status: int = 0) -> str:
    result = subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=240, check=False, env=os.environ
    )
    assert result.returncode == status, result.stderr
    return result.stdout if status == 0 else result.stderr


@pytest.mark.parametrize(("batch", "steps"), [(1, 30), (64, 30)])
def test_synthetic_run_is_verified_by_content(batch, steps):
    report = json.loads(run("demo", "--synthetic", str(batch), "--steps", str(steps), "--json"))
    assert report["verified"] is True
    assert report["requests"] >= batch + steps
    assert report["output_tokens"] > report["requests"]
    assert 4 < report["bytes_per_token"] < 200


def test_the_kernel_runs_behind_the_whole_path_under_the_interpreter():
    out = run("demo", "--device", "interpret", "--synthetic", "8", "--steps", "10", "--json")
    report = json.loads(out)
    assert (report["verified"], report["device"], report["backend"]) == (True, "interpret", "triton")


def test_a_wrong_token_at_the_receiver_is_not_verified(monkeypatch):
    from gpupack.demo import synthetic
    from gpupack.demo.run import run_synthetic

    draw = synthetic.SyntheticLoop._draw

    def draw_another(self, number):
        life = draw(self, number)
        life.token_ids[0] += number == 3  # what is sampled for one request differs from what was noted
        return life

    monkeypatch.setattr(synthetic.SyntheticLoop, "_draw", draw_another)
    assert run_synthetic("cpu", 8, 10, seed=1).verified is False


def test_doctor_names_what_is_usable():
    out = run("doctor")
    for name in ("python", "torch", "triton", "CUDA", "pinned memory", "triton interpreter", "pyzmq", "numba cache"):
        assert any(line[4:].startswith(f"{name}:") for line in out.splitlines()), name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--synthetic", "0"), "expected a number from 1"),
        (("demo", "--synthetic", "20000000"), "gpupack: ConfigError: capacity"),
        (("nothing",), "invalid choice"),
    ],
)
def test_errors_are_one_line(arguments, said):
    error = run(*arguments, status=1 if "ConfigError" in said else 2)
    assert said in error
    assert "Traceback" not in error


@pytest.fixture(scope="module")
def model():
    from gpupack.demo.model import SlotModel

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SlotModel.load(num_slots=3, max_len=MAX_LEN, device="cpu")
    torch.set_num_threads(threads)


@pytest.mark.model
def test_greedy_texts_equal_those_of_generate(model):
    from gpupack.demo.loop import SchedulerLoop

    info, tokenizer = model.info, model.tokenizer.backend_tokenizer
    config = PackerConfig(vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids, capacity=3, window=64)
    with ReceiverProcess(len(GREEDY), tokenizer) as receiver:
        judge = StopStringJudge(tokenizer, config)
        streamer = OutputStreamer(Packer(config), OutputSender(receiver.endpoint), judge=judge)
        SchedulerLoop(model, streamer).run(GREEDY)
        receiver.finish(60)
        streamer.close()
    reference = copy.deepcopy(model.causal_lm)
    reference.set_attn_implementation("sdpa")
    for prompt in GREEDY:
        ids = torch.tensor([model.encode_chat(prompt.text)])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=prompt.max_new_tokens
        )
        text, _ = expected_output(tokenizer, prompt, out[0, ids.shape[1] :].tolist(), info.eos_token_ids)
        assert receiver.texts[prompt.rid] == text
    assert receiver.finish_reasons["fruits"] == {"type": "stop", "matched": "healthy and bal"}
    assert receiver.finish_reasons["hello"] == {"type": "length", "length": 1}


@pytest.mark.model
def test_the_demo_verifies_itself():
    report = json.loads(run("demo", "--json"))
    assert report["verified"] is True
    assert set(report["texts"]) == {prompt.rid for prompt in PROMPTS}
    assert len({prompt.text for prompt in PROMPTS}) == report["requests"] >= 8
    keys = {"device", "backend", "requests", "output_tokens", "rows", "wire_bytes", "pack_us_median", "step_us_median"}
    assert keys <= set(report)
