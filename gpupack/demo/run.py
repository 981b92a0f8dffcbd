"""The two runs of the demo, their options and their report."""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from gpupack.core.config import Device, PackerConfig
from gpupack.demo.loop import LoopStats
from gpupack.demo.receiver_process import ReceiverProcess
from gpupack.packer.packer import Packer
from gpupack.streamer.output_streamer import OutputStreamer
from gpupack.transport.sender import OutputSender

MAX_PROMPT = 96  # tokens of the longest prompt, chat template included
FINISH_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class DemoReport:
    """What a run of the demo did; `--json` prints it."""

    device: str
    backend: str
    model: str
    requests: int
    output_tokens: int
    rows: int
    wire_bytes: int
    bytes_per_token: float
    pack_us_median: float
    step_us_median: float
    seconds: float
    texts: dict[str, str]
    verified: bool

    def to_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def run_model(device: str | None, running: int, show: Any) -> DemoReport:
    """Serve the demo's prompts from the real model; `show` is told of text as it arrives."""
    import torch

    from gpupack.demo.loop import SchedulerLoop
    from gpupack.demo.model import SlotModel
    from gpupack.demo.prompts import PROMPTS
    from gpupack.demo.verify import expected_output
    from gpupack.text.stop_strings import StopStringJudge

    # One core is the receiver's; with all of them, threads spin against it at every barrier.
    torch.set_num_threads(max((os.cpu_count() or 2) - 1, 1))
    longest = max(prompt.max_new_tokens for prompt in PROMPTS)
    model = SlotModel.load(num_slots=running, max_len=MAX_PROMPT + longest, device=device)
    info, tokenizer = model.info, model.tokenizer.backend_tokenizer
    config = PackerConfig(
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        capacity=running,
        window=128,
        device=_packer_device(info.device),
    )
    began = time.perf_counter()
    with ReceiverProcess(len(PROMPTS), tokenizer) as receiver:
        judge = StopStringJudge(tokenizer, config)
        streamer = OutputStreamer(Packer(config), OutputSender(receiver.endpoint), judge=judge)
        loop = SchedulerLoop(model, streamer)
        try:
            loop.run(PROMPTS, on_step=lambda: show(receiver))
            receiver.finish(FINISH_TIMEOUT_S)
        finally:
            streamer.close()
        show(receiver)
    seconds = time.perf_counter() - began
    expected = {p.rid: expected_output(tokenizer, p, loop.sampled[p.rid], info.eos_token_ids) for p in PROMPTS}
    verified = receiver.texts == {rid: text for rid, (text, _) in expected.items()}
    tokens = sum(count for _, count in expected.values())
    return _report(info.device, info.name, len(PROMPTS), tokens, loop.stats, seconds, receiver.texts, verified)


def run_synthetic(device: str | None, batch: int, steps: int, seed: int) -> DemoReport:
    """Serve random lives of random tokens, `batch` at a time; the receiver's contents are checked by hash."""
    from gpupack.demo.synthetic import EOS_TOKEN_ID, VOCAB_SIZE, SyntheticLoop

    device = device or default_device()
    config = PackerConfig(
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_TOKEN_ID,),
        capacity=batch,
        window=64,
        max_accept=4,
        max_in_flight=1,
        device=_packer_device(device),
    )
    packer = Packer(config)
    began = time.perf_counter()
    total = SyntheticLoop.total_requests(batch, steps)
    with ReceiverProcess(total) as receiver:
        streamer = OutputStreamer(packer, OutputSender(receiver.endpoint))
        loop = SyntheticLoop(streamer, batch, steps, seed)
        try:
            loop.run()
            summary = receiver.finish(FINISH_TIMEOUT_S)
        finally:
            streamer.close()
    verified = summary["digests"] == loop.digests
    seconds = time.perf_counter() - began
    return _report(device, "synthetic", total, loop.output_tokens, loop.stats, seconds, {}, verified)


def default_device() -> str:
    """CUDA if torch can use it, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _packer_device(device: str) -> Device:
    """Where the packer of a model on `device` runs."""
    if device == "interpret":
        return "interpret"
    return "cuda" if device.startswith("cuda") else "cpu"


def _report(
    device: str,
    model: str,
    requests: int,
    tokens: int,
    stats: LoopStats,
    seconds: float,
    texts: dict[str, str],
    verified: bool,
) -> DemoReport:
    return DemoReport(
        device=device,
        backend="cpu" if _packer_device(device) == "cpu" else "triton",
        model=model,
        requests=requests,
        output_tokens=tokens,
        rows=stats.rows,
        wire_bytes=stats.frame_bytes,
        bytes_per_token=round(stats.frame_bytes / max(tokens, 1), 1),
        pack_us_median=round(statistics.median(stats.pack_ns) / 1000, 1),
        step_us_median=round(statistics.median(stats.step_ns) / 1000, 1),
        seconds=round(seconds, 1),
        texts=texts,
        verified=verified,
    )
