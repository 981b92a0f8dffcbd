"""What becomes of bytes: at `gpupack.wire.decode`, and at the obvious reader."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference_reader import RefusedError, read

from gpupack.core import layout as L
from gpupack.core.errors import WireError
from gpupack.wire.codec import decode
from gpupack.wire.frame import Frame, KnownRows
from gpupack.wire.metadata import encode_side

LIMIT = 1 << 20


def outcome(data: bytes, known: KnownRows | None = None) -> Frame | str:
    """The frame, or the name of the error class."""
    try:
        return decode(data, max_frame_bytes=LIMIT, known=lambda _: known)
    except WireError as error:
        return type(error).__name__


def reference_outcome(data: bytes) -> dict[str, Any] | str:
    """The same of the obvious reader."""
    try:
        return read(data, LIMIT)
    except RefusedError as refused:
        return str(refused.args[0])


def assert_like_reference(data: bytes) -> Frame | str:
    """Compare `decode` with the obvious reader: the same error class, or the same columns."""
    got, expected = outcome(data), reference_outcome(data)
    if isinstance(expected, str):
        assert got == expected
        return got
    assert isinstance(got, Frame), got
    for name in L.WIRE_SECTIONS:
        column = getattr(got, name)
        if name == "side":
            assert encode_side(column) == encode_side(expected["side"])  # as bytes: a NaN differs from itself
        elif column is None:
            assert name not in expected
        else:
            assert column.view(np.uint32 if name == "logprobs" else np.int32).tolist() == expected[name]
    assert (got.dp_rank, got.step, got.idle) == (expected["dp_rank"], expected["step"], expected["idle"])
    return got
