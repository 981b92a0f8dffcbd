"""The zmq contexts of senders and receivers: how they begin, and how they end with an owner that was never closed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable

import zmq

Context = zmq.Context[zmq.Socket[bytes]]


def context_of_batch_threads() -> Context:
    """A context whose thread does not preempt the one that wakes it.

    Where cores are few, zmq's thread otherwise runs first and the scheduler waits for it: handing over
    a frame takes several times as long, and the receiver has it no earlier.
    """
    context: Context = zmq.Context()
    if hasattr(os, "SCHED_BATCH"):
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


def close_when_collected(owner: object, closers: Iterable[Callable[[], object]], context: Context | None) -> None:
    """Once `owner` is garbage, call what `closers` holds then, and terminate `context`, if given.

    Left to pyzmq, a context among cyclic garbage may end before its sockets, for which it then waits for ever.
    Neither `closers` nor what it holds may refer to the owner.
    """
    weakref.finalize(owner, _end, closers, context).atexit = False  # pyzmq itself leaves contexts alone at exit


def _end(closers: Iterable[Callable[[], object]], context: Context | None) -> None:
    for close in closers:
        close()
    if context is not None:
        context.term()
