"""The frames whose bytes are kept in tests/golden/, and the recipe that makes them.

`PYTHONSAFEPATH=1 PYTHONPATH=tests .venv/bin/python tests/golden_frames.py` writes the files anew. A change in them
is a change of the wire, and wants a new version number.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from frames import Row, Step, frame_of

from gpupack.core import layout as L
from gpupack.wire.codec import encode_frame
from gpupack.wire.frame import stamp
from gpupack.wire.metadata import Array, InputLogprobs, OpeningRecord, RowExtras, SideRecord

FOLDER = Path(__file__).parent / "golden"
STREAM_ID = 0x1122334455667788
FRAME_NO = 5
DP_RANK = 3

ODD_LOGPROBS = np.array([0xBDCCCCCD, 0xFF800000, 0xFFC01234, 0x80000000], np.uint32).view(np.float32)

STEPS = {
    "plain": Step([Row(9, 2, [65], 4), Row(4, 7, [66, 67, -1], 12, flags=L.ROW_EARLY), Row(7, 1, [], 0)], step=17),
    "logprobs": Step(
        [Row(0, 1, [5], 1, logprobs=[ODD_LOGPROBS[0]]), Row(1, 1, [6, 7], 9, logprobs=list(ODD_LOGPROBS[1:]))],
        has_logprobs=True,
        step=2**40,
    ),
    "side": Step(
        [
            Row(3, 1, [11, 12], 2, flags=L.ROW_OPENING),
            Row(2, 5, [13], 8, flags=L.ROW_FINAL, code=L.FINISH_HOST),
            Row(8, 4, [14], 1, flags=L.ROW_OPENING | L.ROW_RESTARTED | L.ROW_FINAL, code=L.FINISH_LENGTH, match=1),
        ],
        step=3,
        side=SideRecord(
            openings=[
                OpeningRecord(row=0, rid="a", worker="ipc://w", prompt_tail=[1, 2, 3], prompt_tokens=3),
                OpeningRecord(row=2, rid="ü", cached_tokens=16, resumed=True, no_stop_trim=True),
            ],
            extras=[RowExtras(row=1, finish={"type": "abort", "message": "gone", "status_code": 499})],
            ended=[(6 << L.SLOT_BITS) | 2],
        ),
    ),
    "families": Step(
        [
            Row(5, 3, [7], 2, logprobs=[-0.5], families=[11, 12, 13, 14, 15], spec=[1, 2, 3, 4, 5, 6, 7, 8]),
            Row(6, 1, [9], 0, flags=L.ROW_HIDDEN_TOKEN, logprobs=[-1.5], spec=[9, 0, 0, 0, 0, 0, 0, 1]),
        ],
        has_logprobs=True,
        step=9,
    ),
    "extras": Step(
        [Row(1, 2, [7, 8], 2, flags=L.ROW_OPENING), Row(6, 1, [9], 5)],
        step=8,
        side=SideRecord(
            openings=[
                OpeningRecord(
                    row=0,
                    rid="e",
                    return_logprob=True,
                    top_logprobs_num=2,
                    token_ids_logprob=[5],
                    image_tokens=3,
                    return_hidden_states=True,
                    cached_tokens_details={"device": 4, "host": 0},
                )
            ],
            extras=[
                RowExtras(
                    row=0,
                    input_logprobs=InputLogprobs([None, -0.5], [3, 4]),
                    hidden_states=[[0.5, 1.5], Array("bfloat16", [2], bytes(4))],
                    customized_info={"key": ["x", None], "none": None},
                ),
                RowExtras(row=1, time_stats=b"t", counts={"reasoning_tokens": 6}),
            ],
            returned=["hidden_states"],
        ),
    ),
    "idle": Step([], step=4, idle=True),
}


def golden_frame(name: str) -> bytes:
    """The bytes of a golden frame, made now."""
    frame = encode_frame(frame_of(STEPS[name], dp_rank=DP_RANK))
    stamp(frame, STREAM_ID, FRAME_NO)
    return bytes(frame)


def kept_frame(name: str) -> bytes:
    """The bytes of a golden frame, as they are kept."""
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


def main() -> None:
    """Write the files, 16 bytes a line."""
    FOLDER.mkdir(exist_ok=True)
    for name in STEPS:
        frame = golden_frame(name)
        lines = [frame[i : i + 16].hex(" ") for i in range(0, len(frame), 16)]
        (FOLDER / f"{name}.hex").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
