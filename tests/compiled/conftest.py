"""Checks of the compiled kernel; their own process (`make check-compiled`), no part of the default run."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("twins", "guarded")
