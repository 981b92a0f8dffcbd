"""Which backend a configuration gets, and what stands in where its kernel cannot be had."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.backends.base import Backend
from gpupack.core.config import PackerConfig
from gpupack.core.errors import ConfigError
from gpupack.core.packed_output import PackedStep
from gpupack.core.step_inputs import StepInputs


def make_backend(config: PackerConfig, *, stream: Any = None) -> Backend:
    """The backend for `config.device`. It loads Numba or Triton, so not before a packer is made.

    If the kernel cannot be compiled here, packing is done on the host, with one warning, unless
    `config.fallback` is False. ConfigError if there is no such device.
    """
    if config.device == "cpu":
        from gpupack.backends.cpu.backend import CpuBackend

        return CpuBackend(config)
    import torch

    from gpupack.backends.cuda.backend import TritonBackend

    try:
        return TritonBackend(config, stream=stream)
    except (ConfigError, torch.OutOfMemoryError):  # neither of which another backend would mend
        raise
    except Exception as error:
        if not config.fallback:
            raise
        warnings.warn(f"gpupack packs on the host: its kernel cannot be used here: {error}", stacklevel=3)
        return host_fallback(config)


def host_fallback(config: PackerConfig) -> Backend:
    """The CPU backend for inputs on a device, which it copies; each step waits for them."""
    from gpupack.backends.cpu.backend import CpuBackend

    class HostFallback(CpuBackend):
        """Packs on the host what a device sampled."""

        def step(self, handles: Any, inputs: StepInputs, control: NDArray[np.int32] | None, mode: int) -> PackedStep:
            """As CpuBackend.step, for arrays on the device; synchronises."""
            return super().step(_on_host(handles), StepInputs(*map(_on_host, inputs)), control, mode)

    return HostFallback(config)


def _on_host(value: Any) -> Any:
    torch = sys.modules.get("torch")
    return value.cpu() if torch is not None and isinstance(value, torch.Tensor) else value
