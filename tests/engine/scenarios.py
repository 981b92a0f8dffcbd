"""Requests to a real server that the golden workload does not make; run by the engine's own interpreter.

scenarios.py NAME OUT.json MODEL PLUGINS [K=V …] [-- server arguments]
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import requests
from serve import Server

PROMPTS = ["The capital of France is", "Once upon a time", "def f(x):", "1 2 3 4 5"]
GREEDY = {"temperature": 0, "ignore_eos": True}
LIMIT_S = 120


def generate(url: str, stream: bool = False, **body: Any) -> list[dict[str, Any]]:
    """Chunks of one request; the whole answer is the last."""
    with requests.post(f"{url}/generate", json={**body, "stream": stream}, stream=stream, timeout=LIMIT_S) as answer:
        if not stream:
            return [answer.json()]
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]


def told(chunk: dict[str, Any]) -> dict[str, Any]:
    """What of an answer does not depend on time."""
    meta = chunk["meta_info"]
    names = ("finish_reason", "completion_tokens", "prompt_tokens", "hidden_states", "weight_versions")
    return {"text": chunk.get("text"), "ids": chunk.get("output_ids"), **{name: meta.get(name) for name in names}}


def token_ids(url: str) -> Any:
    """Requests of token ids, without a tokenizer in the engine."""
    sampling = {**GREEDY, "max_new_tokens": 24}
    return [
        told(generate(url, stream, input_ids=[5 + i, 17, 300, 42 + i], sampling_params=sampling)[-1])
        for i in range(4)
        for stream in (False, True)
    ]


def hidden_states(url: str) -> Any:
    """Requests that return hidden states beside requests that do not."""
    sampling = {**GREEDY, "max_new_tokens": 8}
    return [
        told(generate(url, stream, text=text, sampling_params=sampling, return_hidden_states=wanted)[-1])
        for text in PROMPTS
        for stream in (False, True)
        for wanted in (False, True)
    ]


def embeddings(url: str) -> Any:
    """Embeddings."""
    return [
        requests.post(f"{url}/encode", json={"text": text}, timeout=LIMIT_S).json()["embedding"] for text in PROMPTS
    ]


def aborts(url: str) -> Any:
    """Requests that are aborted by name and by a client that leaves; then an ordinary one."""
    sampling = {**GREEDY, "max_new_tokens": 1500}
    last: dict[str, Any] = {}

    def run(rid: str) -> None:
        last[rid] = generate(url, True, rid=rid, text=PROMPTS[0], sampling_params=sampling)

    threads = [threading.Thread(target=run, args=(f"abort-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    body = {"text": PROMPTS[1], "sampling_params": sampling, "stream": True}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=LIMIT_S) as answer:
        for _, line in zip(range(6), answer.iter_lines(), strict=False):
            assert line is not None
    time.sleep(0.5)
    for i in range(4):
        requests.post(f"{url}/abort_request", json={"rid": f"abort-{i}"}, timeout=LIMIT_S)
    for thread in threads:
        thread.join(LIMIT_S)
    ends = [last[rid][-1]["meta_info"]["finish_reason"]["type"] for rid in sorted(last)]
    after = generate(url, text=PROMPTS[2], sampling_params={**GREEDY, "max_new_tokens": 16})[-1]
    return [*ends, told(after)]


def crowd(url: str) -> Any:
    """128 requests at once: all come to their end, whatever their numbers."""
    counts: dict[int, Any] = {}

    def run(i: int) -> None:
        sampling = {**GREEDY, "max_new_tokens": 30 + i % 8, "stream_interval": 1 + i % 3}
        more = {"return_logprob": True, "top_logprobs_num": 2} if i % 4 == 0 else {}
        chunks = generate(url, i % 2 == 0, text=PROMPTS[i % 4], sampling_params=sampling, **more)
        logprobs = len(chunks[-1]["meta_info"].get("output_token_logprobs") or ())
        counts[i] = [chunks[-1]["meta_info"]["completion_tokens"], logprobs]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [counts[i] for i in range(128)]


def main(name: str, out: str, model: str, plugins: str, *rest: str) -> None:
    """Run one scenario on a server of its own."""
    at = rest.index("--") if "--" in rest else len(rest)
    environment = dict(item.split("=", 1) for item in rest[:at])
    environment["SGLANG_PLUGINS"] = plugins
    with Server(*rest[at + 1 :], model=model, env=environment, python=sys.executable) as server:
        answers = globals()[name](server.url)
        time.sleep(1)  # the plugin writes its counters a few times a second
    with open(out, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
