"""PackGraph: a packer's launch as a CUDA graph of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpupack.core.errors import ConfigError, InputError
from gpupack.packer.packer import Packer
from gpupack.packer.pending_step import Ticket

if TYPE_CHECKING:
    from gpupack.backends.cuda.runtime import Graph


class PackGraph:
    """One launch for batches of up to `batch_capacity` rows (None: `max_batch`), captured.

    Its inputs may lie anywhere: a replay reads where `prepare_launch` said. An engine that has a graph anyway captures
    `Packer.enqueue()` in that one, behind its sampler. ConfigError without CUDA, InputError if there can be no such
    batch.
    """

    def __init__(self, packer: Packer, batch_capacity: int | None = None) -> None:
        self._backend: Any = packer.backend
        if not hasattr(self._backend, "runtime"):
            raise ConfigError("device: expected 'cuda' for a graph, this packer packs on the host")
        self.batch_capacity = packer.launch_capacity(batch_capacity)
        self._packer = packer
        self._graph: Graph = self._backend.runtime.capture(lambda: packer.enqueue(self.batch_capacity))

    def step(self, handles: Any, token_ids: Any = None, **inputs: Any) -> Ticket:
        """As `Packer.step`, by a replay."""
        if len(handles) > self.batch_capacity:
            raise InputError(f"handles: expected at most {self.batch_capacity} rows in this graph, got {len(handles)}")
        self._packer.prepare_launch(handles, token_ids, **inputs)
        self._packer.guarded(self._graph.replay, self._backend.inputs)
        return self._packer.commit_launch()
