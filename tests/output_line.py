"""A packer, a streamer and a receiver at the two ends of a socket, for tests of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpupack.core.config import PackerConfig
from gpupack.packer.packer import Packer
from gpupack.streamer.output_streamer import OutputStreamer
from gpupack.transport.message_columns import OutputColumns
from gpupack.transport.receiver import Delta, OutputReceiver, ReceivedStep
from gpupack.transport.sender import OutputSender

TIMEOUT_MS = 5000
OPTIONS = {"vocab_size": 1000, "capacity": 8, "window": 64, "max_accept": 8}


class Line:
    """Both ends; options of PackerConfig by name, `streamer` has those of OutputStreamer.

    zmq queues `frames` frames at each end.
    """

    def __init__(
        self, path: Path, *, streamer: dict[str, Any] | None = None, frames: int = 64, dp_rank: int = 0, **options: Any
    ) -> None:
        self.receiver = OutputReceiver(f"ipc://{path}/line", high_water_mark=frames)
        self.packer = Packer(PackerConfig(**OPTIONS | options))
        self.sender = OutputSender(self.receiver.endpoint, dp_rank=dp_rank, high_water_mark=frames)
        self.streamer = OutputStreamer(self.packer, self.sender, **streamer or {})

    def close(self) -> None:
        """Close both ends."""
        self.streamer.close()
        self.receiver.close()

    def put(self, handles: Any, *runs: Sequence[int], **inputs: Any) -> int:
        """One step with a run of token ids for each handle; the bytes of its frame, which is not received."""
        token_ids = np.zeros((len(runs), max([1, *map(len, runs)])), np.int64)
        for row, run in enumerate(runs):
            token_ids[row, : len(run)] = run
        accept_lens = np.array([len(run) for run in runs], np.int32)
        ticket = self.packer.step(np.asarray(handles, np.int64), token_ids, accept_lens=accept_lens, **inputs)
        return self.streamer.send(ticket).frame_bytes

    def receive(self) -> ReceivedStep:
        """The next step that was sent."""
        step = self.receiver.recv(TIMEOUT_MS)
        assert step is not None
        return step

    def step(self, handles: Any, *runs: Sequence[int], **inputs: Any) -> ReceivedStep:
        """`put`, and what comes of it."""
        assert self.put(handles, *runs, **inputs)
        return self.receive()

    def columns(self, handles: Any, *runs: Sequence[int], **inputs: Any) -> OutputColumns:
        """The columns that come of a step."""
        return OutputColumns.of(self.step(handles, *runs, **inputs))

    def deltas(self, handles: Any, *runs: Sequence[int], **inputs: Any) -> list[Delta]:
        """The deltas that come of a step."""
        return self.step(handles, *runs, **inputs).deltas()


def scores(*rows: Sequence[float]) -> np.ndarray:
    """Logprobs, float32 `[rows, most]`."""
    out = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for row, values in enumerate(rows):
        out[row, : len(values)] = values
    return out


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Callable[..., Line]]:
    """Makes lines, and closes them."""
    made: list[Line] = []

    def make(**options: Any) -> Line:
        made.append(Line(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
