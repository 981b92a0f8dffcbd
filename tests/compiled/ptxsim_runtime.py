"""A device whose launches are the compiled kernel's PTX, executed by ptxsim on host memory."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import GuardedMemory
from torch import Tensor

from gpupack.backends.cuda.host_runtime import HostRuntime
from gpupack.core import layout as L

ROOT = Path(__file__).resolve().parents[2]
PTXSIM = Path(os.environ.get("PTXSIM", ROOT.parent / "shared" / "ptxsim"))
if not (PTXSIM / "ptxsim").is_dir():
    pytest.skip(f"no ptxsim at {PTXSIM} (set PTXSIM)", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled in this process", allow_module_level=True)
sys.path.append(str(PTXSIM))

import ptxsim  # noqa: E402
from ptxsim.memory import GlobalMemory  # noqa: E402

POINTER_TYPES = {torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}


def reads_reused_slot(race: Any) -> bool:
    """A block reads a slot's state while another block writes it.

    Allowed only in batches where a row with an ended handle names the slot of a live row: no other two
    rows can meet there. Such a row is stale whatever it reads, since the generation decides, and that
    word a launch only writes back as it was; what the row reads beside is not used.
    """
    return bool(race.arg == "arena_ptr" and race.kind == "read-write" and race.scope == "grid")


@cache
def compiled(
    kernel: Any, arch: int, types: tuple[tuple[str, str], ...], aligned: tuple[str, ...], constants: Any, warps: int
) -> Any:
    """The simulator's kernel for one variant."""
    return ptxsim.compile(kernel, dict(types), dict(constants), arch=arch, num_warps=warps, aligned=list(aligned))


def variant(kernel: Any, arch: int, arguments: Sequence[Tensor], constants: dict[str, Any], warps: int) -> Any:
    """The variant that Triton's JIT would launch: types and 16-byte alignment of these very arguments."""
    params = [param for param in kernel.params if not param.is_constexpr]
    types = tuple((p.name, POINTER_TYPES[a.dtype]) for p, a in zip(params, arguments, strict=True))
    aligned = tuple(
        p.name
        for p, a in zip(params, arguments, strict=True)
        if a.data_ptr() % 16 == 0 and not (p.do_not_specialize or p.do_not_specialize_on_alignment)
    )
    return compiled(kernel, arch, types, aligned, tuple(sorted(constants.items())), warps)


class WithInputs(ptxsim.Kernel):
    """A kernel that reaches further tensors by their addresses, which lie in its argument `control_ptr`.

    The simulator gives addresses of its own to what a launch may touch. The inputs get some, too, and these stand
    in the control block while the kernel runs.
    """

    def __init__(self, kernel: Any, inputs: Sequence[Tensor | None], at: int) -> None:
        """`at` is the first word of the control block in use."""
        self.__dict__.update(vars(kernel))
        assert not any(self.scratch), "a kernel with scratch memory binds more than its arguments"
        names = zip(L.LAUNCH_INPUTS, inputs, strict=True)
        self.addresses = slice(at + L.LAUNCH_ADDRESSES, at + L.LAUNCH_WORDS)
        self.inputs = [(name, array) for name, array in names if array is not None and array.numel()]

    def _bind(self, args: Any, n_ctas: int, poison: Any) -> Any:
        _, symbols, sizes = super()._bind(args, n_ctas, poison)
        arrays = [(name, value) for (name, _), value in zip(self.args, args, strict=True)]
        memory = GlobalMemory([*arrays, *self.inputs], list(self.module.consts.items()), poison)
        symbols |= {name: memory.address(name) for name in self.module.consts}
        for (param, _), (name, _) in zip(self.params, self.args, strict=False):
            symbols[param] = struct.pack("<Q", memory.address(name))
        region, offset = memory.pointer["control_ptr"]
        start = region.start + offset
        first, last = self.addresses.start, self.addresses.stop
        words = memory.buf[start + L.WORD * first : start + L.WORD * last].view("int64")
        for index, name in enumerate(L.LAUNCH_INPUTS):
            words[index] = memory.address(name) if name in dict(self.inputs) else 0
        return memory, symbols, sizes

    def launch(self, grid: Any, *args: Any, **options: Any) -> Any:
        """As the simulator's; the addresses are the caller's again afterwards."""
        control = args[[name for name, _ in self.args].index("control_ptr")].numpy()
        kept = control[self.addresses].copy()
        try:
            return super().launch(grid, *args, **options)
        finally:
            control[self.addresses] = kept


@dataclass
class PtxSimRuntime(HostRuntime):
    """DeviceRuntime on ptxsim; a launch has been done when the call returns.

    Every launch runs under the next seed. A race of either order, an access outside an argument, a
    read of the output and a deadlock raise.
    """

    arch: int
    seed: int = 0
    schedule: str = "random"
    races: str = "raise"
    edit: Callable[[Any], Any] = lambda kernel: kernel  # another kernel in place of the one asked for
    allow: list[Callable[[Any], bool]] = field(default_factory=list)
    memory: GuardedMemory = field(default_factory=GuardedMemory)
    launches: list[Any] = field(default_factory=list)  # (programs, Stats) of every launch
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lanes: int = 32

    def zeros(self, words: int, dtype: torch.dtype) -> Tensor:
        """Cleared memory between guards, `[words]`."""
        return self.memory.zeros(words, dtype)

    host = zeros

    def launch(
        self,
        kernel: Any,
        programs: int,
        arguments: Sequence[Tensor],
        constants: dict[str, Any],
        warps: int,
        inputs: Sequence[Tensor | None] = (),
    ) -> None:
        """Execute `programs` programs; the caller's memory is as before if this raises."""
        built = variant(self.edit(kernel), self.arch, arguments, constants, warps)
        if inputs:
            scan = arguments[[name for name, _ in built.args].index("scan_ptr")]
            built = WithInputs(built, inputs, int(scan[L.SCAN_RING]) * constants["CONTROL_WORDS"])
        self.seed += 1
        stats = built.launch(
            (programs,), *arguments, seed=self.seed, schedule=self.schedule, races=self.races, allow=self.allow,
            poison=("out_ptr",),
        )  # fmt: skip
        self.memory.check()
        self.launches.append((programs, stats))
