"""Payloads: our columns as the message classes of the sglang that is installed, by their own field lists.

Importing this module loads nothing of sglang; making `Payloads` does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import fields as columns_of
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from gpupack.core.errors import ConfigError, InputError
from gpupack.transport.message_columns import EmbeddingColumns, OutputColumns

# Fields that are none in every message that we make: not measured, or features that gpupack leaves out.
ALWAYS_NONE = frozenset(
    {
        "output_token_entropy_val",
        "output_token_sampling_mask",
        "output_token_sampling_logprobs",
        "placeholder_tokens_idx",
        "placeholder_tokens_val",
    }
)


@dataclass(frozen=True)
class Plan:
    """How columns become a message class: fields that take a column, fields that are none.

    `dropped` are columns for which the class has no field.
    """

    message: Callable[..., Any]
    taken: tuple[str, ...]
    none: tuple[str, ...]
    dropped: tuple[str, ...]

    @classmethod
    def of(cls, message: type[msgspec.Struct], columns: type, package: str) -> Plan:
        """Compare the fields of a message class with our columns.

        ConfigError, which names the field and `package`, for a required field that we know nothing of.
        Optional ones keep their default.
        """
        ours = [column.name for column in columns_of(columns)]
        taken, none = [], []
        for field in msgspec.structs.fields(message):
            if field.name in ours:
                taken.append(field.name)
            elif field.required and field.name in ALWAYS_NONE:
                none.append(field.name)
            elif field.required:
                raise ConfigError(
                    f"{message.__name__}.{field.name}: expected fields that gpupack knows, got a required one "
                    f"that it does not, in {package}"
                )
        return cls(message, tuple(taken), tuple(none), tuple(name for name in ours if name not in taken))

    def make(self, columns: Any, forms: Mapping[str, Callable[[Any], Any]]) -> Any:
        """The message; `forms` say how the values of some fields change, those that are none aside."""
        values: dict[str, Any] = dict.fromkeys(self.none)
        for name in self.taken:
            value = getattr(columns, name)
            form = forms.get(name)
            values[name] = value if form is None or value is None else form(value)
        return self.message(**values)


class Payloads:
    """Makes `BatchTokenIDOutput` and `BatchEmbeddingOutput` of the installed sglang.

    Objects that only that package can wrap, time stats and customized info, go through its own wrapper.
    ConfigError, at construction, without sglang or with a required field that gpupack does not know.
    """

    def __init__(self) -> None:
        try:
            package = f"sglang {version('sglang')}"
            messages: Any = import_module("sglang.srt.managers.io_struct")
            self._stats: Any = import_module("sglang.srt.observability.req_time_stats").SchedulerReqTimeStats
        except (PackageNotFoundError, ImportError, AttributeError) as error:
            raise ConfigError(f"sglang: expected an installed version that can be imported, got: {error}") from error
        self.outputs = Plan.of(messages.BatchTokenIDOutput, OutputColumns, package)
        self.embeddings = Plan.of(messages.BatchEmbeddingOutput, EmbeddingColumns, package)
        wrap = messages.wrap_as_pickle
        self._forms: dict[str, Callable[[Any], Any]] = {
            "decode_ids": _arrays,
            "output_ids": _arrays,
            "routed_experts": _tensors,
            "indexer_topk": _tensors,
            "pooled_hidden_states": _tensors,
            "time_stats": lambda stats: wrap([self._time_stats(entry) for entry in stats]),
            "customized_info": wrap,
        }

    def output(self, columns: OutputColumns) -> Any:
        """The `BatchTokenIDOutput` of one step."""
        return self.outputs.make(columns, self._forms)

    def embedding(self, columns: EmbeddingColumns) -> Any:
        """The `BatchEmbeddingOutput` of one step."""
        return self.embeddings.make(columns, self._forms)

    def _time_stats(self, data: bytes | None) -> Any:
        """The package's record of one request; without bytes one that says nothing."""
        stats = self._stats()
        if data is not None:
            try:
                state = msgspec.msgpack.decode(data, type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise InputError(f"time_stats: expected what time_stats_bytes made, got: {error}") from None
            if state:
                stats.decode_json(state)
                stats.enable_metrics = True  # else the package sends nothing of it
        return stats


def time_stats_bytes(stats: Any) -> bytes:
    """What `OutputStreamer.attach(time_stats=)` takes of sglang's time stats: what the package sends of them."""
    return msgspec.msgpack.encode(stats.encode_json())


def _arrays(rows: Iterable[Iterable[int]]) -> list[Any]:
    """Token ids in the form of the message: 64-bit arrays."""
    return [array("q", ids) for ids in rows]


def _tensors(rows: Iterable[Any]) -> list[Any]:
    """Arrays as torch tensors of their own; none where there is none."""
    return [None if entry is None else _tensor(entry) for entry in rows]


def _tensor(entry: Any) -> Any:
    if hasattr(entry, "torch"):  # gpupack's own Array
        return entry.torch()
    import torch

    return entry if isinstance(entry, torch.Tensor) else torch.from_numpy(entry.copy())
