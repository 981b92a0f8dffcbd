"""Which backend a configuration gets."""

from __future__ import annotations

from typing import Any

from gpupack.backends.base import Backend
from gpupack.core.config import PackerConfig
from gpupack.core.errors import ConfigError


def make_backend(config: PackerConfig, *, stream: Any = None) -> Backend:
    """The backend for `config.device`. It loads Numba or Triton, so not before a packer is made.

    ConfigError if there is no such device, or if its kernel cannot be compiled here.
    """
    if config.device == "cpu":
        from gpupack.backends.cpu.backend import CpuBackend

        return CpuBackend(config)
    import torch

    from gpupack.backends.cuda.backend import TritonBackend

    try:
        return TritonBackend(config, stream=stream)
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"device: expected a device for which the kernel compiles, {config.device!r} gave {type(error).__name__}: "
            f"{error}; device='cpu' packs on the host"
        ) from error
