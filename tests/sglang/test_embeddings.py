"""Embedding and reward models: every column of the real message, and what the presets keep of its faults."""

from __future__ import annotations

import os
from typing import Any

import columns as message_columns
import numpy as np
import pytest
import torch
from newcomers import Newcomers
from ours import PRESET, Ours
from real import RealStreamer, Setting
from tally import TALLY
from told import Told, counts_of, reason_of, request_of

from gpupack import EmitPolicy
from gpupack.sglang.payload import Payloads
from gpupack.streamer.embeddings import EmbeddingGather
from gpupack.transport.message_columns import EmbeddingColumns

STEPS = int(os.environ.get("GPUPACK_SGLANG_STEPS", "500")) // 10
WIDTH = 5
SETTING = Setting("embeddings", is_generation=False, storage_tier="DiskBackend")
DENSE = ("float32", "float16", "bfloat16")
KINDS = (*DENSE, "lists", "sparse", "scores")


class Engine:
    """An embedding engine: its batches on the real streamer and on ours."""

    def __init__(self, kind: str, words: Any, folder: Any, policy: EmitPolicy = PRESET) -> None:
        self.rng = np.random.default_rng([9, KINDS.index(kind)])
        self.kind, self.newcomers = kind, Newcomers(self.rng, SETTING, words, f"{kind}.")
        self.dense = getattr(torch, kind) if kind in DENSE else None
        gather = EmbeddingGather(WIDTH, kind, max_batch=16) if self.dense is not None else None
        self.real = RealStreamer(SETTING)
        self.ours = Ours(SETTING, f"ipc://{folder}/{kind}", policy, gather=gather)
        self.handles: dict[str, int] = {}
        self.told: dict[str, Told] = {}
        self.chunked: list[Any] = []
        self.seen: list[Any] = []

    def batch(self) -> tuple[list[Any], Any, list[Any]]:
        """Requests of the next step, its embeddings and its pooled hidden states."""
        rng = self.rng
        reqs = self.chunked + [self.newcomers.make() for _ in range(int(rng.integers(self.dense is not None, 4)))]
        reqs += [req for req in self.seen if rng.random() < 0.4]
        gone = [self.handles[req.rid] for req in self.seen if req not in reqs]
        self.ours.streamer.retire(np.array(gone, np.int64))
        reqs = [reqs[i] for i in rng.permutation(len(reqs))]
        embeddings = self._embeddings(len(reqs))
        shape = (2, 3) if rng.random() < 0.7 else (1, 3)
        states = []
        for i, req in enumerate(reqs):
            if not req.finished():
                self._run(req, embeddings[i], shape)
            elif self.dense is not None:
                embeddings[i] = torch.tensor(req.embedding)
            else:
                embeddings[i] = req.embedding
            states.append(req.pooled_hidden_state)
        self.chunked = [req for req in reqs if not req.finished()]
        self.seen = [req for req in reqs if req.finished()]
        return reqs, embeddings, states

    def _run(self, req: Any, embedding: Any, shape: tuple[int, ...]) -> None:
        """What the package's result processor does with a pooled output."""
        rng = self.rng
        req.embedding = embedding.tolist() if self.dense is not None else embedding
        if rng.random() < 0.15:
            req.retraction_count += 1
        if rng.random() < 0.25:
            return  # its prefill is not complete
        if req.return_pooled_hidden_states or rng.random() < 0.5:
            rows = shape if rng.random() < 0.8 else (int(rng.integers(1, 4)), 3)
            req.pooled_hidden_state = torch.from_numpy(rng.standard_normal(rows, dtype=np.float32))
        req.sampling_params.max_new_tokens = 0
        req.output_ids.append(0)
        req.update_finish_state()
        req.time_stats.enable_metrics, req.time_stats.forward_entry_time = True, float(rng.random())

    def _embeddings(self, batch: int) -> Any:
        rng = self.rng
        if self.dense is not None:
            return torch.from_numpy(rng.standard_normal((batch, WIDTH), dtype=np.float32)).to(self.dense)
        if self.kind == "sparse":
            return [
                {int(i): float(rng.random()) for i in rng.integers(0, 999, rng.integers(0, 4))} for _ in range(batch)
            ]
        if self.kind == "scores":
            return [float(score) for score in rng.random(batch)]
        return [rng.standard_normal(tuple(rng.integers(1, 4, int(rng.integers(1, 3))))).tolist() for _ in range(batch)]

    def stream(self, reqs: list[Any], embeddings: Any, states: list[Any]) -> tuple[Any, EmbeddingColumns | None]:
        """Both streamers' messages of one step."""
        streamer = self.ours.streamer
        for req in reqs:
            if req.rid not in self.handles:
                (self.handles[req.rid],) = streamer.admit([request_of(req)]).tolist()
            told = self.told.setdefault(req.rid, Told())
            told.times = b""  # a request that is given again is given with its time stats
            news = told.news(req, SETTING)
            if news:
                streamer.attach(self.handles[req.rid], **news)
        handles = np.array([self.handles[req.rid] for req in reqs], np.int64)
        streamer.set_counts(handles, **counts_of(reqs))
        report = streamer.stream_embeddings(
            handles,
            embeddings,
            finished=np.array([req.finished() for req in reqs], np.bool_),
            reasons=[reason_of(req) if req.finished() else None for req in reqs],
            pooled_hidden_states=states,
        )
        received = self.ours.receiver.recv(10_000) if report.frame_bytes else None
        real = self.real.stream(reqs, False)
        return real, None if received is None else EmbeddingColumns.of(received)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_every_column_is_the_real_one(kind, words, wire, tmp_path):
    engine, payloads = Engine(kind, words, tmp_path), Payloads()
    with engine.ours:
        sent_again = run(engine, wire, payloads, STEPS // len(KINDS) + 1)
    assert sent_again or STEPS < 60


def run(engine, wire, payloads, steps):
    """Compare some steps; how often a request was sent again."""
    sent_again = 0
    for number in range(steps):
        before = {req.rid for req in engine.seen}
        batch = engine.batch()
        real, ours = engine.stream(*batch)
        TALLY.steps["embeddings"] += 1
        assert ours is not None, f"{engine.kind}, step {number}: real {real.rids}, ours none"
        sent_again += len(before & set(real.rids))
        where = f"embeddings {engine.kind}, step {number}"
        made = wire.carry(payloads.embedding(ours))
        TALLY.compare(where, message_columns.of(wire.carry(real)), message_columns.of(made))
    return sent_again


def test_the_default_sends_once_and_nothing_when_empty(words, tmp_path):
    engine = Engine("lists", words, tmp_path, EmitPolicy())
    sent: list[str] = []
    empty = 0
    with engine.ours:
        for _ in range(40):
            real, ours = engine.stream(*engine.batch())
            empty += not real.rids
            assert (ours is None) == (not set(real.rids) - set(sent))
            sent += [] if ours is None else ours.rids
    assert empty
    assert len(set(sent)) == len(sent)
