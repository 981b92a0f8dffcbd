"""The plugin's device backend over the interpreted kernel: each step packed as on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_engine_device import SLOTS, Req, result_of, small_packer, split

from gpupack import Packer
from gpupack.core import layout as L
from gpupack.sglang.device.pool_handles import PoolHandles
from gpupack.sglang.device.tensors import step_inputs

ACCEPT = 4
STRIDES = {"a token each": (1, 1), "verified": (ACCEPT + 1, ACCEPT)}  # of ids, of logprobs
ASKED = [(False, 0), (True, 0), (True, 3), (True, 1), (False, 0)]


def sampled(rng, reqs, tokens, scores):
    """What an engine samples for a batch, with the strides of a verify step or without."""
    n, nums = len(reqs), [req.logprob.top_logprobs_num for req in reqs]
    values, ids = torch.randn(n * scores, 5).topk(3)
    each = [num for num in nums for _ in range(scores)]
    verified = {} if tokens == 1 else {
        "accept_lens": torch.from_numpy(rng.integers(1, ACCEPT + 1, n)), "speculative_num_draft_tokens": tokens,
    }  # fmt: skip
    return result_of(
        torch.from_numpy(rng.integers(0, 999, n * tokens)),
        logprobs=torch.randn(n) if tokens == 1 else torch.randn(n, scores),
        top_val=split(values, each),
        top_idx=split(ids, each),
        **verified,
    )


@pytest.mark.parametrize("kind", STRIDES)
def test_a_step_is_packed_as_on_the_cpu(kind):
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    host = small_packer(ACCEPT)
    packers = [host, Packer(replace(host.config, device="interpret"))]
    generations = np.ones(SLOTS, np.int64)
    handles = [PoolHandles(packer, generations) for packer in packers]
    reqs = [Req(f"r{i}", *asked) for i, asked in enumerate(ASKED)]
    for step in range(6):
        chosen = rng.permutation(len(reqs))[: rng.integers(1, len(reqs) + 1)]
        batch, indices = [reqs[i] for i in chosen], chosen + 1
        if step == 3:
            generations[indices[0]] += 1  # retracted, and given again
        result = sampled(rng, batch, *STRIDES[kind])
        found = []
        for packer, pool in zip(packers, handles, strict=True):
            owners = pool.of(batch, indices)
            packer.prepare_launch(owners, **step_inputs(result, len(batch), *pool.asked(indices)))
            packer.enqueue(len(batch))
            packed = packer.commit_launch().wait()
            columns = [packed.column(field).tolist() for field in range(L.ROW_WIDTH)]
            items = (packed.token_ids, packed.logprobs.view(np.int32), packed.families)
            found.append([columns, *(part.tolist() for part in items)])
            packed.release()
        assert found[0] == found[1]
        assert len(found[0][0][L.R_SLOT]) == len(batch)
