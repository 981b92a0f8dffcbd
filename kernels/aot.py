"""Compiles the kernels ahead of time, without a GPU, and reports what each variant takes.

`python -m gpupack.kernels.aot` prints the table; `tests/compiled` holds `MAX_REGISTERS` and that nothing
spills. Only in a process without Triton's interpreter: that one accepts what the compiler rejects.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from gpupack.kernels.launch import kernel_constants, launch_shape
from gpupack.kernels.pack import pack_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpupack.core.config import EmitPolicy, PackerConfig

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POLICIES = {
    "default": EmitPolicy(),
    "0.5.16": EmitPolicy.sglang_0_5_16(),
    "0.5.23": EmitPolicy.sglang_0_5_23(),
}
POINTERS = {"scan_ptr": "*i64"}  # all others are int32
# Registers a thread, by max_accept; more with the loops that move records, of which few are in use at a time.
MAX_REGISTERS = {1: 144, 4: 208}
MAX_RECORD_REGISTERS = 264
MAX_SPILLS = 32  # bytes, on CUDA: ptxas keeps a few variants below a limit of its own at that price
CHANNELS: dict[str, dict[str, Any]] = {
    "tokens": {"logprobs": False},
    "logprobs": {},
    "top-k": {"max_top_logprobs": 20, "max_token_ids_logprobs": 8},
    "counters": {"speculative": True},
    "all": {"max_top_logprobs": 20, "max_token_ids_logprobs": 8, "speculative": True},
}


class Variant(NamedTuple):
    """What chooses the code: target, what is kept beside tokens (`CHANNELS`), longest run, policy."""

    target: str
    channels: str
    max_accept: int
    policy: str


class Resources(NamedTuple):
    """What a variant takes: registers, bytes of spills and of local memory a thread; of shared memory; of code."""

    registers: int
    spills: int
    local: int
    shared: int
    size: int


def variants() -> Iterator[Variant]:
    """Every variant that is looked after; the presets differ in a few comparisons, so not in all widths."""
    for target in TARGETS:
        for max_accept in MAX_REGISTERS:
            for channels in CHANNELS:
                yield Variant(target, channels, max_accept, "default")
            if target == "sm_90":
                yield Variant(target, "all", max_accept, "0.5.16")
                yield Variant(target, "all", max_accept, "0.5.23")


def compile_variant(variant: Variant) -> Any:
    """Triton's compiled kernel, as the JIT would compile it for a packer of this kind."""
    config = PackerConfig(
        vocab_size=128_000,
        max_accept=variant.max_accept,
        policy=POLICIES[variant.policy],
        **CHANNELS[variant.channels],
    )
    target = TARGETS[variant.target]
    shape = launch_shape(config, lanes=target.warp_size)
    constants = kernel_constants(config, shape)
    return _compile(pack_kernel, target, POINTERS, constants, shape.warps)


def _compile(kernel: Any, target: GPUTarget, pointers: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    """Compile a kernel; arguments that are not in `pointers` are int32."""
    names = kernel.arg_names
    signature, attributes = {}, {}
    for index, param in enumerate(kernel.params):
        if param.is_constexpr:
            signature[param.name] = "constexpr"
            continue
        signature[param.name] = pointers.get(param.name, "*i32")
        if not param.do_not_specialize_on_alignment:  # our own allocations are aligned, and the JIT says so
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    return triton.compile(source, target=target, options={"num_warps": warps})


def resources(variant: Variant) -> Resources:
    """Compile a variant and say what it takes."""
    built = compile_variant(variant)
    if TARGETS[variant.target].backend == "hip":
        return _hip_resources(built)
    return _cuda_resources(built, TARGETS[variant.target].arch)


def _cuda_resources(built: Any, arch: int) -> Resources:
    """From ptxas, which Triton brings along."""
    from triton.backends.nvidia.compiler import get_ptxas

    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "pack.ptx"), Path(folder, "pack.cubin")
        source.write_text(built.asm["ptx"])
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{suffix}", source, "-o", binary]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr

    def number(pattern: str) -> int:
        found = re.findall(pattern, log)
        return sum(map(int, found))

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        local=number(r"(\d+) bytes stack frame"),
        shared=built.metadata.shared,
        size=len(built.asm["cubin"]),
    )


def _hip_resources(built: Any) -> Resources:
    """From the metadata in the assembly; vector registers, and spills in bytes of a thread."""
    text = built.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        if found is None:
            raise ValueError(f"no .{name} in the assembly of gfx942")
        return int(found.group(1))

    return Resources(
        registers=number("vgpr_count"),
        spills=4 * (number("vgpr_spill_count") + number("sgpr_spill_count")),
        local=number("private_segment_fixed_size"),
        shared=built.metadata.shared,
        size=len(built.asm["hsaco"]),
    )


def main() -> None:
    """Print the table."""
    print("| target | channels | max_accept | policy | registers | spills | local | shared | size |")
    print("| --- " * 9 + "|")
    for variant in variants():
        print("| " + " | ".join(map(str, (*variant, *resources(variant)))) + " |", flush=True)


if __name__ == "__main__":
    main()
