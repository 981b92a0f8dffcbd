"""EmbeddingBatch: what one call of `OutputStreamer.stream_embeddings` asks of the packer and sends beside its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.array_checks import check_rows, host_array
from gpupack.core.errors import InputError
from gpupack.core.packed_output import PackedStep
from gpupack.core.request import FinishReason, Resume, is_reason
from gpupack.core.row_control import Control
from gpupack.packer.packer import Packer
from gpupack.packer.slots import SlotTable
from gpupack.streamer.embeddings import EmbeddingGather, GatheredRows, is_tensor
from gpupack.streamer.frame_room import ROW_BYTES, array_bytes, opening_bytes
from gpupack.streamer.metadata_values import checked_array, encoded
from gpupack.streamer.new_requests import Openings
from gpupack.wire.array import Array
from gpupack.wire.metadata import Embedding

_embedding = msgspec.msgpack.Decoder(Embedding | None)


class Carried(NamedTuple):
    """What the rows of an embedding frame carry: fields of the extras, by row, and fields of the side record."""

    extras: dict[int, dict[str, Any]]
    arrays: dict[str, Array]


class EmbeddingBatch:
    """The arguments of `OutputStreamer.stream_embeddings`, checked before anything changes.

    `handles` int64 `[B]`, `finished` bool `[B]`; `control` ends the finished ones and skips the others, and
    `reasons` has, by handle, those that travel in the side record. `room` says how many bytes a frame of so many
    rows has for that.
    """

    def __init__(
        self,
        handles: Any,
        embeddings: Any,
        finished: Any,
        reasons: Sequence[FinishReason | None] | None,
        pooled_hidden_states: Any,
        *,
        slots: SlotTable,
        gather: EmbeddingGather | None,
        room: Callable[[int], int],
    ) -> None:
        self.handles = host_array("handles", handles, (np.int64,), (1,))
        batch = len(self.handles)
        self.finished = np.ones(batch, np.bool_)
        if finished is not None:
            self.finished = host_array("finished", finished, (np.bool_,), (1,))
            check_rows("finished", self.finished, batch)
        self._chosen = np.flatnonzero(self.finished).tolist()
        self._gather = gather
        self._dense: Any = None
        self._values: dict[int, msgspec.Raw] = {}
        self._rows: GatheredRows | None = None
        self._take_embeddings(embeddings)
        self._pooled = self._pooled_states(pooled_hidden_states)
        self.reasons = self._reasons(slots, reasons)
        size, most = self._nbytes(slots), room(len(self._chosen))
        if size > most:
            raise InputError(f"embeddings: expected at most {most} bytes beside the columns of a frame, got {size}")
        self.control = self._control()

    def _nbytes(self, slots: SlotTable) -> int:
        """Most bytes of the side record: embeddings, states, reasons and opening records of the finished requests."""
        dense = 0 if self._dense is None or self._gather is None else len(self._chosen) * self._gather.row_bytes
        carried = sum(map(len, self._values.values())) + sum(map(array_bytes, self._pooled.values()))
        requests = [slots.find(handle) for handle in self.handles[self._chosen].tolist()]
        openings = sum(opening_bytes(request) for request in requests if request is not None)
        reasons = len(msgspec.msgpack.encode(list(self.reasons.values())))
        return dense + carried + openings + reasons + ROW_BYTES * len(self._chosen)

    def begin_again(self, packer: Packer, openings: Openings, final: NDArray[np.bool_]) -> None:
        """Let finished requests send again whose final row has gone (`final`, by slot): they open once more."""
        sent = [
            int(handle) & 0xFFFFFFFF
            for handle in self.handles[self.finished]
            if packer.slots.find(int(handle)) is not None and final[int(handle) & 0xFFFFFFFF]
        ]
        refused = len(set(sent)) < len(sent) or len(self.handles) > packer.config.batch_capacity
        if sent and not refused:  # what the packer will refuse must change nothing
            slots = np.array(sent, np.int64)
            packer.begin_again(slots)
            openings.admit(slots, [Resume()] * len(sent))

    def carried(self, packed: PackedStep) -> Carried:
        """What the rows of this batch's packed step carry; valid until `release()`.

        Launches the gather and waits for it, if the embeddings are one tensor.
        """
        index = packed.column(L.R_BATCH_INDEX)
        arrays: dict[str, Array] = {}
        extras: dict[int, dict[str, Any]] = {}
        if len(index) and self._gather is not None and self._dense is not None:
            rows = self._rows = self._gather.gather(self._dense, index).wait()
            # Encoded before it is released, so that it need not be copied first.
            arrays["embeddings"] = Array(rows.dtype, list(rows.shape), cast(bytes, rows.data))
        places = index.tolist()
        for row, place in enumerate(places):
            if place in self._values:
                extras.setdefault(row, {})["embedding"] = self._values[place]
        states = [self._pooled.get(place) for place in places]
        stacked = _stack(states)
        if stacked is not None:
            arrays["pooled_hidden_states"] = stacked
        else:
            for row, state in enumerate(states):
                if state is not None:
                    extras.setdefault(row, {})["pooled_hidden_state"] = state
        return Carried(extras, arrays)

    def release(self) -> None:
        """Give back what `carried` gathered."""
        if self._rows is not None:
            self._rows.release()
            self._rows = None

    def _take_embeddings(self, embeddings: Any) -> None:
        """Check the embeddings: one tensor for a gather, or a value for each finished request."""
        batch = len(self.handles)
        if is_tensor(embeddings) or isinstance(embeddings, np.ndarray):
            if self._gather is None:
                raise InputError(
                    "embeddings: expected a list, or OutputStreamer(gather=EmbeddingGather(…)), got a tensor"
                )
            self._gather.check(embeddings)
            self._gather.check_free()
            check_rows("embeddings", embeddings, batch)
            if len(self._chosen) > self._gather.max_batch:
                raise InputError(
                    f"finished: expected at most the gather's max_batch = {self._gather.max_batch}, "
                    f"got {len(self._chosen)}"
                )
            self._dense = embeddings
            return
        if not isinstance(embeddings, Sequence) or isinstance(embeddings, (str, bytes)) or len(embeddings) != batch:
            raise InputError(f"embeddings: expected a tensor or a list of {batch} entries, got {_said(embeddings)}")
        for place in self._chosen:
            value = encoded("embeddings", embeddings[place])
            try:
                if _embedding.decode(value) is not None:
                    self._values[place] = value
            except msgspec.MsgspecError as error:
                raise InputError(
                    f"embeddings: expected numbers, lists of them or {{index: number}} in row {place}: {error}"
                ) from None

    def _pooled_states(self, states: Any) -> dict[int, Array]:
        """Copies of the finished requests' pooled hidden states, by place in the batch."""
        if states is None:
            return {}
        if not hasattr(states, "__len__") or len(states) != len(self.handles):
            raise InputError(f"pooled_hidden_states: expected {len(self.handles)} entries, got {_said(states)}")
        found = {}
        for place in self._chosen:
            try:
                if states[place] is not None:
                    found[place] = checked_array("state", states[place])
            except InputError as error:
                raise InputError(f"pooled_hidden_states: row {place}: {error}") from None
        return found

    def _reasons(self, slots: SlotTable, reasons: Sequence[FinishReason | None] | None) -> dict[int, FinishReason]:
        if reasons is not None and len(reasons) != len(self.handles):
            raise InputError(f"reasons: expected {len(self.handles)} entries, got {len(reasons)}")
        found: dict[int, FinishReason] = {}
        for place in self._chosen:
            handle = int(self.handles[place])
            reason = None if reasons is None else reasons[place]
            request = slots.find(handle)
            if reason is None and request is not None:
                reason = request.finish_reason
            if reason is None:
                continue
            if not is_reason(reason):
                raise InputError(f"reasons: expected dicts with a type, of strings and numbers, got {reason!r}")
            found[handle] = reason
        return found

    def _control(self) -> Control:
        """End what is finished: with its reason, else at the length of an embedding's output, which is 0."""
        control = Control(len(self.handles)).reset(len(self.handles))
        control.flags[:] = np.where(self.finished, L.CONTROL_FINISH, L.CONTROL_SKIP)
        control.finish_code[self.finished] = L.FINISH_LENGTH
        if self.reasons:
            control.finish_code[np.isin(self.handles, list(self.reasons))] = L.FINISH_HOST
        return control


def _stack(states: list[Array | None]) -> Array | None:
    """The states as one array `[rows, …]`, if there are several, none is missing and all are of one kind."""
    whole = [state for state in states if state is not None]
    if len(states) < 2 or len(whole) < len(states) or len({(s.dtype, tuple(s.shape)) for s in whole}) > 1:
        return None
    return Array(whole[0].dtype, [len(whole), *whole[0].shape], b"".join(state.data for state in whole))


def _said(value: Any) -> str:
    """What came in place of a sequence, for an error message."""
    name = type(value).__name__
    return f"{name} of {len(value)}" if hasattr(value, "__len__") else name
