"""A real SGLang with the plugin and without, in turns: what its output costs (docs/integration.md).

Run by the engine's interpreter, see `make bench-engine`. Writes bench/results/bench_engine.jsonl and prints a table.
The clock: `stream_output` by the plugin's own counters, CPU time of the scheduler's thread, encoding and sending
included; for the engine's streamer the plugin only times it (GPUPACK_BACKEND=engine). CPU times are the processes'
own, idle waiting included where they spin. Client and engine share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from serve import Server

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "bench_engine.jsonl"
WAYS = {
    "engine": {"GPUPACK_BACKEND": "engine"},
    "compatible": {"GPUPACK_WIRE": "compatible"},
    "native": {"GPUPACK_WIRE": "native"},
}
ARGUMENTS = [
    "--max-running-requests",
    "256",
    "--max-total-tokens",
    "65536",
    "--dtype",
    "bfloat16",
    "--log-level",
    "warning",
]
PROCESSES = ("scheduler", "detokenizer")


async def load(url: str, streams: int, tokens: int, top: int) -> tuple[list[float], int]:
    """Milliseconds between the chunks of each stream, and the tokens that came."""
    gaps: list[float] = []
    came = 0
    body: dict[str, Any] = {
        "text": "Once upon a time",
        "stream": True,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    if top:
        body |= {"return_logprob": True, "top_logprobs_num": top}

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal came
        last = None
        async with session.post(f"{url}/generate", json=body) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if last is not None:
                    gaps.append((now - last) * 1e3)
                last = now
        came += tokens

    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=streams)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 22) as session:
        await asyncio.gather(*(one(session) for _ in range(streams)))
    return gaps, came


def cpu_of(server: Server) -> dict[str, float]:
    """CPU seconds of the engine's processes so far, by name."""
    seconds = {}
    for child in psutil.Process(server.process.pid).children(recursive=True):
        title = " ".join(child.cmdline())
        for name in PROCESSES:
            if f"sglang::{name}" in title:
                seconds[name] = sum(child.cpu_times()[:2])
    return seconds


def counters(file: Path) -> dict[str, Any]:
    """The plugin's counters, once it has written them."""
    time.sleep(0.6)
    return json.loads(file.read_text().splitlines()[-1])


def measure(server: Server, stats: Path, streams: int, top: int, tokens: int) -> dict[str, Any]:
    """One row."""
    cpu, before = cpu_of(server), counters(stats)
    begun = time.perf_counter()
    gaps, came = asyncio.run(load(server.url, streams, tokens, top))
    wall = time.perf_counter() - begun
    after = counters(stats)
    spent = {name: seconds - cpu[name] for name, seconds in cpu_of(server).items()}
    calls = after["steps"] + sum(after["fallbacks"].values()) - before["steps"] - sum(before["fallbacks"].values())
    busy_ms = sum(after[name] - before[name] for name in ("pack_ms", "send_ms", "engine_ms"))
    quantiles = statistics.quantiles(gaps, n=100)
    return {
        "streams": streams,
        "top_logprobs": top,
        "calls": calls,
        "stream_output_us": round(busy_ms * 1e3 / calls, 1),
        "scheduler_cpu_us_per_token": round(spent["scheduler"] * 1e6 / came, 1),
        "detokenizer_cpu_us_per_token": round(spent["detokenizer"] * 1e6 / came, 1),
        "tokens_per_s": round(came / wall, 1),
        "gap_p50_ms": round(quantiles[49], 2),
        "gap_p99_ms": round(quantiles[98], 2),
    }


def round_of(way: str, args: argparse.Namespace, number: int) -> list[dict[str, Any]]:
    """All rows of one server."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.jsonl"
        environment = {"GPUPACK_SGLANG": "1", "GPUPACK_STATS": str(stats), "SGLANG_PLUGINS": "gpupack", **WAYS[way]}
        log = f"{folder}/server.log"
        with Server(*ARGUMENTS, model=args.model, env=environment, python=sys.executable, log=log) as server:
            asyncio.run(load(server.url, 8, 16, 0))
            asyncio.run(load(server.url, 8, 16, 5))
            for top in (0, 5):
                for streams in args.streams:
                    row = measure(server, stats, streams, top, args.tokens)
                    rows.append({"way": way, "round": number, **row})
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over the rounds, in Markdown."""
    names = [name for name in rows[0] if name.endswith(("_us", "_token", "_s", "_ms"))]
    lines = ["| streams | top | way | " + " | ".join(names) + " |", "| --- " * (len(names) + 3) + "|"]
    for top in (0, 5):
        for streams in sorted({row["streams"] for row in rows}):
            for way in WAYS:
                same = [r for r in rows if (r["streams"], r["top_logprobs"], r["way"]) == (streams, top, way)]
                if not same:
                    continue
                values = [f"{statistics.median(row[name] for row in same):.1f}" for name in names]
                lines.append(f"| {streams} | {top} | {way} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run all ways in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--append", action="store_true", help="add to the rows that are there, one run after the other")
    args = parser.parse_args()
    old = [json.loads(line) for line in RESULTS.read_text().splitlines()] if args.append else []
    rows = [row for number in range(args.rounds) for way in args.ways for row in round_of(way, args, number)]
    about = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine(),
             "cores": psutil.cpu_count(), "sglang": version("sglang"), "tokens": args.tokens}  # fmt: skip
    rows = old + [{**about, **row} for row in rows]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))


if __name__ == "__main__":
    main()
