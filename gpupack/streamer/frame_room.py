"""Room: what a frame has left for its side record, and how much of it things take."""

from __future__ import annotations

import msgspec

from gpupack.core.request import Request
from gpupack.wire.array import Array
from gpupack.wire.metadata import CachedTokensDetails

# Upper bounds of what is the same for all, in bytes: keys, headers, numbers.
SIDE_BYTES = 512  # of a side record, and of its section in the frame
ROW_BYTES = 512  # of a row's extras
OPENING_BYTES = 512
ARRAY_BYTES = 256
HEADER_BYTES = 5  # of one value


class Room:
    """Bytes that a frame has left for what its rows take; `refused` counts what did not fit."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.refused = 0

    def fits(self, size: int) -> bool:
        """Whether `size` bytes fit; they count as used then."""
        if size > self.left:
            self.refused += 1
            return False
        self.left -= size
        return True


def array_bytes(array: Array) -> int:
    """Most bytes of an array."""
    return ARRAY_BYTES + len(array.data)


def details_bytes(details: CachedTokensDetails | None) -> int:
    """Bytes of cached-token details."""
    return 0 if details is None else len(msgspec.msgpack.encode(details))


def key_bytes(key: str) -> int:
    """Most bytes of a key of customized info, and of the header of its values."""
    return 2 * HEADER_BYTES + text_bytes(key)


def opening_bytes(request: Request) -> int:
    """Most bytes of the opening record of a request, its cached-token details aside."""
    texts = text_bytes(request.rid) + text_bytes(request.http_worker_ipc or "") + text_bytes(request.decoded_text)
    return OPENING_BYTES + texts + HEADER_BYTES * len(request.token_ids_logprob)


def text_bytes(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
