"""The layout's numbers as Triton compile-time constants; `gpupack/core/layout.py` is where they are defined."""

from __future__ import annotations

import triton.language as tl

from gpupack.core import layout

_NAMES = [name for name, value in vars(layout).items() if name.isupper() and isinstance(value, int)]

globals().update({name: tl.constexpr(getattr(layout, name)) for name in _NAMES})


def __getattr__(name: str) -> tl.constexpr:  # for type checkers; every name is set above
    raise AttributeError(name)
