"""Random requests, inputs and control for a packer's configuration: everything that is valid may come."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupack.core import layout as L
from gpupack.core.config import PackerConfig
from gpupack.core.request import NO_LIMIT, Request
from gpupack.core.row_control import Control

ODD_BITS = np.array([0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F800001, 0x80000000, 0x00000001], np.uint32)
WAYS = np.array(
    [0] * 8
    + [
        L.CONTROL_SKIP,
        L.CONTROL_HOLD,
        L.CONTROL_HOLD,
        L.CONTROL_FLUSH,
        L.CONTROL_FINISH,
        L.CONTROL_RETRACTED,
    ],
    np.int32,
)


class Draws:
    """Draws from a seed."""

    def __init__(self, config: PackerConfig, seed: int) -> None:
        self.config = config
        self.rng = np.random.default_rng(seed)
        self.requests = 0

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def request(self) -> Request:
        """A request of any kind."""
        self.requests += 1
        config, scored = self.config, self.chance(0.6)
        return Request(
            f"r{self.requests}",
            max_new_tokens=self.pick(NO_LIMIT, NO_LIMIT, 30, 12, 5, 2, 1, 0),
            stream=self.chance(0.7),
            stream_interval=self.pick(None, 1, 2, 3, 50, 50),
            stop_token_ids=self.rng.integers(0, config.vocab_size, int(self.rng.integers(0, 5))).tolist(),
            ignore_eos=self.chance(0.2),
            judge=self.pick("device", "device", "device", "engine"),
            return_logprob=scored,
            top_logprobs_num=int(self.rng.integers(0, config.max_top_logprobs + 1)) * scored,
            token_ids_logprob=[5] * int(self.rng.integers(0, config.max_token_ids_logprobs + 1)) * scored,
        )

    def inputs(self, rows: int) -> dict[str, Any]:
        """What a step takes in, as far as the configuration has it: ids outside the vocabulary, any bit patterns."""
        config, positions = self.config, self.config.max_accept + int(self.rng.integers(0, 2))
        wide = self.chance(0.5)
        tokens = self.rng.integers(0, config.vocab_size, (rows, positions), np.int64 if wide else np.int32)
        outside = [config.vocab_size, -1, 2**31 - 1, -(2**31)] + [2**40, -(2**40), 2**32 + 1, -(2**32) + 1] * wide
        bad = self.rng.random(tokens.shape) < 0.01
        tokens[bad] = self.rng.choice(np.array(outside, tokens.dtype), int(bad.sum()))
        given: dict[str, Any] = {"token_ids": tokens, "logprobs": self.scores(rows, positions)}
        if config.max_top_logprobs:
            shape = (rows, positions, config.max_top_logprobs + int(self.rng.integers(0, 2)))
            given["top_logprobs_val"] = self.scores(*shape)
            given["top_logprobs_idx"] = self.rng.integers(0, 2**31, shape, self.pick(np.int32, np.int64))
        if config.max_token_ids_logprobs:
            given["token_ids_logprobs_val"] = self.scores(rows, positions, config.max_token_ids_logprobs)
        if config.speculative and self.chance(0.7):
            given["block_accept_lens"] = self.rng.integers(0, 9, rows, self.pick(np.int32, np.int64))
        if config.speculative and self.chance(0.7):
            given["cap_lens"] = self.rng.integers(0, config.max_accept + 1, rows, self.pick(np.int32, np.int64))
        return given

    def scores(self, *shape: int) -> NDArray[np.float32]:
        """Any bit pattern."""
        bits = self.rng.integers(0, 2**32, shape, np.uint32)
        odd = self.rng.random(shape) < 0.2
        bits[odd] = self.rng.choice(ODD_BITS, int(odd.sum()))
        return bits.view(np.float32)

    def control(self, lengths: NDArray[np.int64]) -> Control:
        """What the host asks of rows whose outputs have these lengths, all of it valid."""
        rows = len(lengths)
        control = Control(max(1, rows)).reset(rows)
        control.flags[:] = self.rng.choice(WAYS, rows)
        finish = control.flags == L.CONTROL_FINISH
        control.finish_code[finish] = self.rng.integers(1, 6, int(finish.sum()))
        control.match[finish] = self.rng.integers(-9, 99, int(finish.sum()))
        cut = finish & (self.rng.random(rows) < 0.5)
        control.finished_len[cut] = np.maximum(lengths - self.rng.integers(0, 6, rows), 0)[cut]
        seen = ~finish & (self.rng.random(rows) < 0.2)
        back = self.rng.integers(0, self.config.visible_limit, rows)
        control.visible_len[seen] = np.maximum(lengths - back, 0)[seen]
        return control
