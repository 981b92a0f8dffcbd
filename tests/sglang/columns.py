"""A message of the real package as plain columns, to be compared value by value."""

from __future__ import annotations

import math
import struct
from array import array
from enum import Enum
from typing import Any

import msgspec
import numpy as np
from real import io_struct

# What sglang 0.5.23 adds to the message of 0.5.16, and the two sampling columns of 0.5.16: not sent by gpupack.
LEFT_OUT = (
    "input_top_logprobs_val_flat", "input_top_logprobs_idx_flat", "input_top_logprobs_flat_null_prefix",
    "output_token_sampling_mask", "output_token_sampling_logprobs", "beam_search_output", "weight_versions",
    "token_steps",
)  # fmt: skip
ALWAYS_ABSENT = ("output_token_entropy_val", "placeholder_tokens_idx", "placeholder_tokens_val")
OPAQUE = ("time_stats", "customized_info")
TIME_STATS = (  # what the package sends of them
    "wait_queue_entry_time", "forward_entry_time", "prefill_finished_time", "queue_duration_s", "has_timing_data",
    "storage_prefetch_wait_s", "storage_staging_wait_s",
)  # fmt: skip
WIRE = "pickled" if io_struct._USE_PICKLE_IPC else "msgpack"
MESSAGES = (io_struct.BatchTokenIDOutput, io_struct.BatchEmbeddingOutput)


def left_out_here() -> list[str]:
    """Columns of this version's messages that are not compared."""
    names = [field.name for message in MESSAGES for field in msgspec.structs.fields(message)]
    return [name for name in dict.fromkeys(names) if name in LEFT_OUT]


def of(message: Any) -> dict[str, Any]:
    """The columns of a message by name; without the ones that are left out."""
    fields = [field.name for field in msgspec.structs.fields(type(message))]
    columns = {name: getattr(message, name) for name in fields if name not in LEFT_OUT}
    for name in OPAQUE:
        if name in columns:
            columns[name] = io_struct.unwrap_from_pickle(columns[name])
    return {name: plain(value) for name, value in columns.items()}


def plain(value: Any) -> Any:
    """Nested lists, dicts, strings, ints, bools, None; floats as their bits, arrays as (dtype, shape, bytes)."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return ("nan",) if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if hasattr(value, "encode_json"):  # the package's time stats
        return {name: plain(getattr(value, name)) for name in TIME_STATS if hasattr(value, name)}
    return value


def readable(value: Any) -> Any:
    """A plain value with its floats as numbers again, for a message about a mismatch."""
    if isinstance(value, bytes) and len(value) == 8:
        return struct.unpack("<d", value)[0]
    if isinstance(value, list):
        return [readable(entry) for entry in value]
    if isinstance(value, dict):
        return {key: readable(entry) for key, entry in value.items()}
    return value
