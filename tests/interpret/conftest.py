"""These tests run the kernel under Triton's interpreter: a process of their own, with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where the interpreter is off: it is chosen when the kernel is decorated."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 in a process of its own"))
