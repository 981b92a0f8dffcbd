"""What goes wrong in a life on the simulated device: calls that must be refused, and ends that close the packer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpupack.core import layout as L
from gpupack.core.errors import ClosedError, StepFailedError

if TYPE_CHECKING:
    from protocol_life import DeviceLife


def refused(error: type[Exception], call: Callable[[], Any]) -> None:
    """The call must raise."""
    try:
        call()
    except error:
        return
    except Exception as other:
        raise AssertionError(f"expected {error.__name__}, got {other!r}") from other
    raise AssertionError(f"expected {error.__name__}")


def fail(life: DeviceLife) -> None:
    """Close the packer in one way or another."""
    if life.in_flight and life.rng.random() < 0.5:
        close(life)
        return
    while life.in_flight:
        life.take_in()
    while life.held:
        life.release()
    handles = np.array(list(life.oracle.records)[:1], np.int64)
    life.poison(life.packer, 0)  # an older step may have left any launch number, and no error
    life.rng.choice([forget, bad_lens if len(handles) else forget, launch_failure, device_failure])(life, handles)


def close(life: DeviceLife) -> None:
    """The packer is closed with steps in flight; its memory may go then."""
    life.packer.close()
    assert not life.runtime.own.queue, "closing waits for what was enqueued"
    refused(ClosedError, life.in_flight[0][0].wait)


def forget(life: DeviceLife, handles: Any) -> None:
    """The caller does not replay."""
    life.packer.prepare_launch(handles)
    refused(StepFailedError, life.packer.commit_launch().wait)


def bad_lens(life: DeviceLife, handles: Any) -> None:
    """The kernel finds an input that the host could not check."""
    lens = life.runtime.tensor(np.zeros(2, np.int32))
    life.runtime.sample(lens, np.array([life.config.max_accept + 1, 0], np.int32))
    given = {"logprobs": np.zeros(2, np.float32)} if life.config.logprobs else {}
    rows = np.append(handles, L.PADDING_HANDLE)
    refused(StepFailedError, life.packer.append(rows, np.ones(2, np.int32), accept_lens=lens, **given).wait)


def launch_failure(life: DeviceLife, handles: Any) -> None:
    """The launch raises."""
    life.runtime.failing = "launch"
    refused(StepFailedError, lambda: life.packer.pack(handles))


def device_failure(life: DeviceLife, handles: Any) -> None:
    """The device reports an error to who waits for an event."""
    life.runtime.pace = 0.0
    ticket = life.packer.pack(handles)
    life.runtime.failing = "event"
    refused(StepFailedError, ticket.wait)
