"""`loop.step_batch` for packers with optional inputs; apart, because compiling it takes as long again."""

from __future__ import annotations

from gpupack.loop import compile_step
from gpupack.loop_optional import OPTIONAL_TYPE

step_batch_with_optional = compile_step(OPTIONAL_TYPE)
