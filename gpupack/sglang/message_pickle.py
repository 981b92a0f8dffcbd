"""PickledMaker: a step's message as the pickle that the engine's sender would make of it, put together from parts.

A pickle is a program for a stack machine, so parts that were made apart can follow each other. Parts are of protocol
3, whose memo is written by explicit index and is read only within the part that wrote it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.sglang import emit_rule as C
from gpupack.sglang.decode_columns import DecodeLogprobs, decode_logprobs, decode_tokens
from gpupack.sglang.message import MessageMaker, output_logprobs
from gpupack.sglang.output_rows import OutputRows
from gpupack.sglang.request_states import KEPT

UInt8 = NDArray[np.uint8]
BEGIN, ITEMS, END = b"\x80\x05", b"(", b"u\x86R."
"""Protocol; mark; set the items of a dict, make a tuple of class and dict, call, stop."""
LIST, LIST_END = b"](", b"e"
ARRAY = b"carray\narray\nq\x000X\x01\x00\x00\x00qq\x010"
"""Put the class and its type code into the memo, at 0 and 1."""


def part(value: Any) -> bytes:
    """Pickle a value so that it can stand anywhere in a pickle."""
    return pickle.dumps(value, 3)[2:-1]


def key(name: str) -> bytes:
    """A string that leaves the memo as it is."""
    data = name.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def read_back(made: bytes) -> Any:
    """What the engine's reader makes of bytes of a `PickledMaker` of this process; never for those of others."""
    return pickle.loads(made)


def there_and_back(value: Any) -> Any:
    """A value of this process as the engine's own wire hands it over."""
    return read_back(pickle.dumps(value))


class PickledMaker(MessageMaker):
    """Makes the bytes of messages; what stays as it is from step to step is pickled once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        rebuild, (kind, absent) = self._plan.message(**self._absent).__reduce__()
        self._keys = {name: key(name) for name in absent}
        self._head = BEGIN + part(rebuild) + part(kind) + part(absent) + ITEMS
        self._kept_part: tuple[Any, bytes] = (None, b"")

    def make(self, out: OutputRows) -> bytes:
        """The pickle of the message; see MessageMaker."""
        parts = [self._head, self._kept(out)]
        if out.batch.facts[C.ONE_TOKEN]:
            tokens = decode_tokens(out)
            parts += self._decode_ids(out, tokens)
            columns = self.others(out, [(token,) for token in tokens] if out.customized else ())
        else:
            output, decode = self.ids(out)
            parts += self._items({"output_ids": output})
            columns = {"decode_ids": decode, **self.others(out, output)}
        if out.batch.return_logprob:
            columns.update(self.input_logprobs(out))
            scores = decode_logprobs(out)
            if scores is None:
                columns.update(output_logprobs(out))
            else:
                parts += self._decode_logprobs(scores)
        parts += [*self._items(self.known(columns)), END]
        return b"".join(parts)

    def _items(self, columns: dict[str, Any]) -> Iterable[bytes]:
        for name, value in columns.items():
            yield self._keys[name]
            yield part(value)

    def _kept(self, out: OutputRows) -> bytes:
        kept = self.kept(out)
        if kept is not self._kept_part[0]:
            columns = self.known(dict(zip(KEPT, kept, strict=True)))
            self._kept_part = (kept, b"".join(self._items(columns)))
        return self._kept_part[1]

    def _decode_ids(self, out: OutputRows, tokens: NDArray[np.int64]) -> list[bytes]:
        rows = _rows(b"h\x00h\x01C\x08", tokens.astype("<i8").view(np.uint8).reshape(-1, 8), b"\x86R")
        output = rows.tobytes()
        decode, width, begun = [], rows.shape[1], 0
        for row in np.flatnonzero(out.rows[C.FIRST]).tolist():
            decode += [output[begun * width : row * width], part(self.first_ids(out, row)), ARRAY]
            begun = row + 1
        decode.append(output[begun * width :])
        return [
            self._keys["output_ids"], ARRAY, LIST, output, LIST_END,
            self._keys["decode_ids"], LIST, *decode, LIST_END,
        ]  # fmt: skip

    def _decode_logprobs(self, scores: DecodeLogprobs) -> list[bytes]:
        rows, top = scores.top_values.shape
        empty = part([[]] * rows)
        columns = {  # what the engine's lists of one position look like, one after the other
            "output_token_logprobs_val": _rows(b"]", _numbers(b"G", scores.values.astype(">f8")), b"a"),
            "output_token_logprobs_idx": _rows(b"]", _numbers(b"J", scores.ids.astype("<i4")), b"a"),
        }
        if top:
            columns["output_top_logprobs_val"] = _rows(b"]](", _numbers(b"G", scores.top_values.astype(">f8")), b"ea")
            columns["output_top_logprobs_idx"] = _rows(b"]](", _numbers(b"J", scores.top_ids.astype("<i4")), b"ea")
        parts = []
        for kind in ("token", "top", "token_ids"):
            for name in (f"output_{kind}_logprobs_val", f"output_{kind}_logprobs_idx"):
                column = columns.get(name)
                parts += [self._keys[name]]
                parts += [empty] if column is None else [LIST, column.tobytes(), LIST_END]
        return parts


def _rows(head: bytes, body: UInt8, tail: bytes) -> UInt8:
    """Bytes `[rows, width]`: the head, the row of `body`, the tail."""
    width = len(head) + body.shape[1] + len(tail)
    rows = np.empty((len(body), width), np.uint8)
    rows[:, : len(head)] = np.frombuffer(head, np.uint8)
    rows[:, len(head) : width - len(tail)] = body
    rows[:, width - len(tail) :] = np.frombuffer(tail, np.uint8)
    return rows


def _numbers(opcode: bytes, values: NDArray[Any]) -> UInt8:
    """Bytes `[rows, …]` that push the values of each row, `[rows]` or `[rows, n]`, in the byte order they are in."""
    numbers = np.empty((values.size, 1 + values.itemsize), np.uint8)
    numbers[:, 0] = opcode[0]
    numbers[:, 1:] = np.ascontiguousarray(values).reshape(-1, 1).view(np.uint8)
    return numbers.reshape(len(values), -1)
