"""ScoreIds: of which output token each logprob is, where a row's logprobs are not those of its tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.wire.frame import Frame

MOST = 1 << 16  # ids that are kept of a request; a sender keeps no more logprobs that were not sent

Ids = list[int | None]


class ScoreIds:
    """Ids of tokens that came without their logprobs, by rid; they go with a request that is retracted.

    The wire has no ids for logprobs: the n logprobs of a row are of the output positions [end - n, end),
    where `end` is the visible length, or 1 where that is 0.
    """

    def __init__(self) -> None:
        # Output position, and the ids before it, as the bytes of int32.
        self._unscored: dict[str, tuple[int, bytes]] = {}

    def forget(self, rid: str) -> None:
        """The output of a request is void, or no more comes of it."""
        self._unscored.pop(rid, None)

    def keep_at_most(self, requests: int) -> None:
        """Forget the oldest beyond `requests`."""
        while len(self._unscored) > requests:
            del self._unscored[next(iter(self._unscored))]

    def note(self, frame: Frame, rows: NDArray[np.intp], rids: list[str], before: list[int]) -> dict[int, Ids]:
        """Take in `rows` of requests that return logprobs, and have fewer or more of them than tokens.

        `rids` and `before`, the tokens of each request before its row, are by row of `rows`. Returns the ids
        of the logprobs of rows that have any; None: not known.
        """
        found: dict[int, Ids] = {}
        for row, rid, length in zip(rows.tolist(), rids, before, strict=True):
            start, end = frame.token_indptr[row : row + 2].tolist()
            delta = frame.token_ids[start:end]
            scores = 0
            if frame.logprob_indptr is not None:
                scores = int(frame.logprob_indptr[row + 1] - frame.logprob_indptr[row])
            if frame.flags[row] & L.ROW_HIDDEN_TOKEN:  # its token is no output, and is that of its logprob
                continue
            visible = int(frame.visible_len[row])
            position, known = self._unscored.pop(rid, (length, b""))
            if position != length:  # rows with as many logprobs as tokens came in between
                known = b""
            tokens = np.concatenate([np.frombuffer(known, np.int32), delta])
            tokens = tokens[: len(tokens) - max(length + len(delta) - visible, 0)]  # cut behind what was sent
            if scores:
                ids: Ids = tokens[-scores:].tolist()
                unknown: Ids = [None] * (scores - len(ids))
                found[row] = unknown + ids
            elif len(tokens):
                self._unscored[rid] = visible, tokens[-MOST:].tobytes()
        return found
