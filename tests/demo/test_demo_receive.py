"""What the demo's receiving process makes of deltas: digests by content, and nothing of what was dropped."""

from __future__ import annotations

from frames import Row
from streams import FINAL, Stream, opening

from gpupack.core import layout as L
from gpupack.demo.receive import DigestSink, content_digest, take_in
from gpupack.transport.stream_reader import StreamReader


def test_a_dropped_request_has_no_digest_and_leaves_nothing():
    sink, stream = DigestSink(), Stream()
    first, record = opening(0, [1], "a")
    second, other = opening(1, [2], "b", row=1)
    frames = [
        stream.frame(first, second, a=record, b=other),
        stream.frame(Row(1, 1, [3], 2, flags=FINAL, code=L.FINISH_LENGTH, match=2), dropped=[1 << L.SLOT_BITS]),
    ]
    reader = StreamReader()
    rows = [take_in(reader.take(frame), sink) for frame in frames]
    assert rows == [2, 1]
    assert sink.digests == {"b": content_digest([2, 3], [], {"type": "length", "length": 2})}
    assert len(sink) == 0
