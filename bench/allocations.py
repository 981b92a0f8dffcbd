"""Counts the blocks that Python's object allocator hands out: a compiled hook in front of the real one.

Objects that come from an interpreter's free lists (floats, small tuples, lists' headers) are not seen.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import carray, cfunc, types

OBJECT_DOMAIN = 2  # PYMEM_DOMAIN_OBJ


class Allocator(ctypes.Structure):
    """PyMemAllocatorEx of the C API."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("ctx", "malloc", "calloc", "realloc", "free")]


class Allocations:
    """While entered, `blocks` rises with every block that is allocated."""

    def __init__(self) -> None:
        self._real, self._hooked = Allocator(), Allocator()
        ctypes.pythonapi.PyMem_GetAllocator(OBJECT_DOMAIN, ctypes.byref(self._real))
        self._count = np.zeros(1, np.int64)
        self._hooks = self._compile()
        self._hooked.ctx = self._count.ctypes.data  # where the hooks count; the real functions do not look at it
        self._hooked.realloc, self._hooked.free = self._real.realloc, self._real.free
        self._hooked.malloc, self._hooked.calloc = (hook.address for hook in self._hooks)

    @property
    def blocks(self) -> int:
        """Blocks so far."""
        return int(self._count[0])

    def __enter__(self) -> Allocations:
        ctypes.pythonapi.PyMem_SetAllocator(OBJECT_DOMAIN, ctypes.byref(self._hooked))
        return self

    def __exit__(self, *error: object) -> None:
        ctypes.pythonapi.PyMem_SetAllocator(OBJECT_DOMAIN, ctypes.byref(self._real))

    def _compile(self) -> tuple[Any, Any]:
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        malloc = ctypes.CFUNCTYPE(pointer, pointer, size)(self._real.malloc)
        calloc = ctypes.CFUNCTYPE(pointer, pointer, size, size)(self._real.calloc)

        @cfunc(types.voidptr(types.voidptr, types.uintp), nopython=True)
        def counted_malloc(ctx, n):  # type: ignore[no-untyped-def]
            carray(ctx, 1, np.int64)[0] += 1
            return malloc(ctx, n)

        @cfunc(types.voidptr(types.voidptr, types.uintp, types.uintp), nopython=True)
        def counted_calloc(ctx, n, each):  # type: ignore[no-untyped-def]
            carray(ctx, 1, np.int64)[0] += 1
            return calloc(ctx, n, each)

        return counted_malloc, counted_calloc
