"""Real engines, a process tree each: `make test-engine`, and `make test-engine-full` (GPUPACK_ENGINE=full)."""

from __future__ import annotations

import pytest
import table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what ran."""
    for line in table.lines():
        terminalreporter.write_line(line)
