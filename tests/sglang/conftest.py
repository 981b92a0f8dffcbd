"""Tests against the real sglang: an environment of its own with one of its versions (`make test-sglang`)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

try:
    VERSION: str | None = version("sglang")
except PackageNotFoundError:
    VERSION = None
else:
    import tally


def pytest_ignore_collect() -> bool | None:
    """Collect nothing where the package is not installed."""
    return True if VERSION is None else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was compared."""
    if VERSION is None:
        terminalreporter.write_line("tests/sglang: no sglang in this environment, see `make test-sglang`")
        return
    for line in tally.summary(VERSION):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def words():
    """The real tokenizer."""
    import real

    return real.tokenizer()


@pytest.fixture(scope="session")
def detokenizers():
    """Two detokenizers of the package: one for real messages, one for ours."""
    import real

    with real.detokenizer() as one, real.detokenizer() as other:
        yield one, other


@pytest.fixture
def wire(tmp_path):
    """The package's own sending and receiving."""
    from wire import RealWire

    with RealWire(tmp_path) as pair:
        yield pair
