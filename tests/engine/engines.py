"""Runs of a real engine with and without the plugin, by the tools beside this repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import table
from configurations import Configuration

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT.parent / "shared" / "sglang_cpu"
MODELS = Path(os.environ.get("GPUPACK_SGLANG_MODELS", ROOT / ".sglang-models"))
LIMIT_S = 900


@dataclass
class Run:
    """What came of one run."""

    out: Path
    log: str
    stats: dict[str, Any]
    seconds: float = 0.0


def python_of(version: str) -> Path:
    """The interpreter of the environment of a version."""
    return ROOT / f".venv-sglang-{version}" / "bin" / "python"


def golden(configuration: Configuration, folder: Path, *, plugged: bool, model: str = "tiny") -> Run:
    """The golden workload; with the plugin each message is compared with the engine's own at the streamer."""
    folder = folder / ("plugged" if plugged else "engine")
    out, stats = folder / "golden.json", folder / "stats.jsonl"
    python = python_of(configuration.version)
    environment = dict(configuration.environment)
    if plugged:
        environment |= {
            "GPUPACK_SGLANG": "1",
            "GPUPACK_VERIFY": "1",
            "GPUPACK_WIRE": configuration.wire,
            "GPUPACK_BACKEND": configuration.backend,
            "GPUPACK_STATS": str(stats),
        }
    plugins = [*configuration.plugins, *(["gpupack"] if plugged else [])]
    command = [str(python), str(TOOLS / "golden.py"), "run", "--model", str(MODELS / model), "--python", str(python)]
    command += ["--plugins", ",".join(plugins) or "none"]
    command += [word for item in environment.items() for word in ("--env", "=".join(item))]
    command += [word for skipped in configuration.skipped for word in ("--skip", skipped)]
    command += [str(out), "--", *configuration.arguments]
    return serve(command, folder, out, stats)


def serve(command: list[str], folder: Path, out: Path, stats: Path, path: Path | None = None) -> Run:
    """A run of a server in a new folder.

    The tools ask for a free port long before the server binds it. Where another program took it meanwhile, the server
    ends before any request; such a run is made once more, and the table says so.
    """
    for again in (False, True):
        folder.mkdir(parents=True)
        begun = time.monotonic()
        done = run(command, folder, path)
        seconds = time.monotonic() - begun
        log = (folder / "server.log").read_text() if (folder / "server.log").exists() else ""
        lost_port = done.returncode != 0 and "ddress already in use" in log and "POST /generate" not in log
        if again or not lost_port:
            break
        table.lost_port(f"{folder.parent.name}, {folder.name}")
        shutil.rmtree(folder)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\nThe server's log:\n{log[:6000]}\n...\n{log[-3000:]}"
    return Run(out, log, read_stats(stats), seconds)


def difference(engine: Run, plugged: Run) -> tuple[int, int, str]:
    """Sequential requests that differ, how many there are, and the tool's own line."""
    python = python_of("0.5.23")
    done = run([str(python), str(TOOLS / "golden.py"), "diff", str(engine.out), str(plugged.out)], engine.out.parent)
    line = done.stdout.strip().splitlines()[-1]
    same, all_of_them = map(int, re.search(r"sequential: (\d+)/(\d+) identical", line).groups())
    return all_of_them - same, all_of_them, done.stdout


def run(command: list[str], folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a folder of its own, where its server's log lands; `path` is where it looks for modules first."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *environment.get("PYTHONPATH", "").split(os.pathsep)])
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        timeout=LIMIT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def read_stats(file: Path) -> dict[str, Any]:
    """The newest counters that the plugin wrote; empty without any."""
    if not file.exists():
        return {}
    return json.loads(file.read_text().splitlines()[-1])
