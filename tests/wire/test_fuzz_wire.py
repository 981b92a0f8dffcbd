"""Hostile bytes at `decode`: WireErrors only, in bounded memory.

`GPUPACK_FUZZ=100000 .venv/bin/pytest -s tests/wire/test_fuzz_wire.py` for the long run; 5,000 of each kind by default.
"""

from __future__ import annotations

import os
import random
import tracemalloc

import pytest
from frames import Row, Step, frame_of
from golden_frames import STEPS, golden_frame
from outcomes import outcome

from gpupack.core import errors
from gpupack.core.errors import WireError
from gpupack.wire.codec import encode_frame
from gpupack.wire.frame import HEADER

FUZZ = int(os.environ.get("GPUPACK_FUZZ", "5000"))


def mutated(chooser: random.Random, frames: list[bytes]) -> bytes:
    """A real frame with a few bytes overwritten, cut, doubled or exchanged with another frame's."""
    data = bytearray(chooser.choice(frames))
    for _ in range(chooser.randint(1, 4)):
        at = chooser.randrange(len(data))
        kind = chooser.randrange(5)
        if kind == 0:
            data[at] = chooser.randrange(256)
        elif kind == 1:
            data[at : at + 4] = chooser.choice([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\0\0\0\0"])
        elif kind == 2:
            del data[at : at + chooser.choice([1, 4, 8, 64])]
        elif kind == 3:
            data[at:at] = data[at : at + 8]
        else:
            other = chooser.choice(frames)
            data[at : at + 16] = other[at : at + 16]
        if not data:
            break
    if len(data) >= HEADER.size and chooser.random() < 0.7:  # past the first check, to reach the others
        data[44:48] = len(data).to_bytes(4, "little")
    return bytes(data)


def random_bytes(chooser: random.Random) -> bytes:
    """Random bytes; half of them with a believable beginning."""
    data = bytearray(chooser.randbytes(chooser.choice([0, 1, 63, 64, 65, 200, 1000])))
    if len(data) >= HEADER.size and chooser.random() < 0.5:
        data[:8] = b"GPKF\2\0" + chooser.randrange(20).to_bytes(2, "little")
        data[40:64] = bytes(4) + len(data).to_bytes(4, "little") + bytes(16)
    return bytes(data)


@pytest.mark.parametrize("kind", ["random", "mutated"])
def test_hostile_bytes_raise_wire_errors_only(kind):
    chooser = random.Random(20)
    frames = [golden_frame(name) for name in STEPS]
    frames.append(bytes(encode_frame(frame_of(Step([Row(i, 1, [i], 1) for i in range(64)])))))
    seen: dict[str, int] = {}
    tracemalloc.start()
    try:
        for _ in range(FUZZ):
            data = random_bytes(chooser) if kind == "random" else mutated(chooser, frames)
            got = outcome(data)
            name = got if isinstance(got, str) else "decoded"
            seen[name] = seen.get(name, 0) + 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(kind, seen, f"peak {peak} bytes")
    assert peak < 4 << 20
    reached = {"FrameTruncatedError", "FrameMagicError", "FrameSectionError"}
    if kind == "mutated":
        reached |= {"FrameValueError", "SideRecordError", "FrameVersionError", "decoded"}
    assert reached <= set(seen)
    assert set(seen) - {"decoded"} <= {name for name in dir(errors) if issubclass_of_wire(name)}


def issubclass_of_wire(name: str) -> bool:
    """Whether `gpupack.core.errors` has a WireError of this name."""
    found = getattr(errors, name)
    return isinstance(found, type) and issubclass(found, WireError)
