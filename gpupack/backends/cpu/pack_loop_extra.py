"""`loop.step_batch` for packers with optional inputs; apart, because compiling it takes as long again."""

from __future__ import annotations

from gpupack.backends.cpu.extra_logprobs import OPTIONAL_TYPE
from gpupack.backends.cpu.pack_loop import compile_step

step_batch_with_optional = compile_step(OPTIONAL_TYPE)
