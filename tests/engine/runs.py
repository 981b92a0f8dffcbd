"""Runs: real engines two at a time, since the scheduler of each keeps a core busy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

AT_ONCE = 2


class Runs:
    """Runs by name, each made once, in the order in which they were begun."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._made: dict[Hashable, Future[Any]] = {}

    def begin(self, name: Hashable, run: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Begin a run as soon as there is room for it, unless one of this name has begun."""
        if name not in self._made:
            self._made[name] = self._pool.submit(run, *arguments, **options)

    def of(self, name: Hashable) -> Any:
        """What came of a run; blocks until it has ended, and raises what it raised."""
        return self._made[name].result()

    @classmethod
    @contextmanager
    def all_of(cls, request: pytest.FixtureRequest, begin: Callable[[Runs, dict[str, Any]], None]) -> Iterator[Runs]:
        """Begin the runs of all selected tests of a module, each told its parameters; those that wait end with it."""
        runs = cls()
        for item in request.session.items:
            if item.path == request.path and hasattr(item, "callspec"):
                begin(runs, item.callspec.params)
        try:
            yield runs
        finally:
            runs._pool.shutdown(cancel_futures=True)
