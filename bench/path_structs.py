"""A struct for each request and step, encoded with msgspec: the shape of vLLM's EngineCoreOutputs, written anew.

The loop makes the structs and nothing else; the field names are vLLM's. There are no intervals in it.
"""

from __future__ import annotations

from time import perf_counter, perf_counter_ns
from typing import Any

import msgspec
import numpy as np
import zmq
from workload import EOS_TOKEN_ID, PROMPT, RowContent, Sent, Step, Workload

VERSION_OF = "msgspec"
RAW = 3  # msgpack extension: the bytes of an array


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one request gets of a step."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: tuple[Any, Any, Any] | None = None  # ids and values [n, 1 + k], sampled first; ranks [n]
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    num_cached_tokens: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a step sends."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    finished_requests: set[str] | None = None


REASONS = ("stop", "length")


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, msgspec.msgpack.Ext(RAW, value.tobytes())
    raise TypeError(f"expected an array, got {type(value).__name__}")


def _raw(code: int, data: memoryview) -> memoryview:
    return data


def _array(parts: Any) -> Any:
    dtype, shape, data = parts
    return np.frombuffer(data, dtype).reshape(shape)


class SchedulerPath:
    """A loop that makes the structs, an encoder, a socket."""

    stages = ("loop", "encode, send")

    def __init__(self, work: Workload, endpoint: str, step_bytes: float) -> None:
        self.work = work
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.connect(endpoint)
        self.encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self.rids = [""] * work.batch
        self.outputs: list[list[int]] = [[] for _ in range(work.batch)]
        self.tokens: list[list[int]] = []
        self.scores: list[tuple[Any, Any, Any]] | None = None

    def prepare(self, step: Step) -> None:
        """The sampler's output as an engine has it: lists of token ids, arrays of logprobs for the whole batch."""
        for place, rid in step.new:
            self.rids[place], self.outputs[place] = rid, list(PROMPT)
        self.tokens = step.tokens.tolist()
        for output, accepted in zip(self.outputs, self.tokens, strict=False):
            output.extend(accepted)
        if step.logprobs is not None:
            values, ids = step.logprobs[:, :, None], step.tokens[:, :, None]
            if step.top_val is not None:
                values, ids = np.concatenate([values, step.top_val], 2), np.concatenate([ids, step.top_idx], 2)
            ranks = np.ones(step.tokens.shape, np.int32)
            self.joined = ids.astype(np.int32), np.ascontiguousarray(values), ranks

    def run(self, step: Step) -> Sent:
        """One step."""
        start = perf_counter_ns()
        reason = REASONS.index("length" if step.at_length else "stop")
        stop = None if step.at_length else EOS_TOKEN_ID
        ending = set(step.ending.tolist())
        outputs = []
        for place, accepted in enumerate(self.tokens):
            scores = None
            if step.logprobs is not None:
                ids, values, ranks = self.joined
                scores = ids[place], values[place], ranks[place]
            ends = place in ending
            outputs.append(
                EngineCoreOutput(
                    self.rids[place],
                    accepted,
                    scores,
                    finish_reason=reason if ends else None,
                    stop_reason=stop if ends else None,
                )
            )
        looped = perf_counter_ns()
        data = self.encoder.encode(EngineCoreOutputs(outputs=outputs, timestamp=perf_counter()))
        self.socket.send(data, copy=False)
        return Sent((looped - start, perf_counter_ns() - looped), len(outputs), len(data))

    def state_bytes(self) -> int:
        """Not known."""
        return 0

    def close(self) -> None:
        """End it."""
        self.socket.close(0)
        self.context.term()


class ReceiverPath:
    """A typed decoder."""

    stages = ("deltas",)

    def __init__(self, work: Workload, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.bind(endpoint)
        self.decoder = msgspec.msgpack.Decoder(EngineCoreOutputs, ext_hook=_raw)
        self.message = EngineCoreOutputs()

    def receive(self) -> tuple[int, ...]:
        """Take a message that is there; arrays of logprobs are made as well."""
        start = perf_counter_ns()
        self.message = self.decoder.decode(self.socket.recv(copy=False).buffer)
        for output in self.message.outputs:
            if output.new_logprobs is not None:
                ids, values, ranks = output.new_logprobs
                output.new_logprobs = _array(ids), _array(values), _array(ranks)
        return (perf_counter_ns() - start,)

    def content(self) -> list[RowContent]:
        """What the newest message says."""
        rows = []
        for output in self.message.outputs:
            ids, values, _ = output.new_logprobs or (np.empty((0, 1)),) * 3
            top = values[:, 1:].tolist() if values.shape[1] > 1 else []
            top_ids = ids[:, 1:].tolist() if values.shape[1] > 1 else []
            reason = "" if output.finish_reason is None else REASONS[output.finish_reason]
            rows.append((output.request_id, output.new_token_ids, values[:, 0].tolist(), top, top_ids, reason))
        return rows

    def forget(self) -> None:
        """Free the newest message."""
        self.message = EngineCoreOutputs()

    def close(self) -> None:
        """End it."""
        self.socket.close(0)
        self.context.term()
