"""PackerConfig and EmitPolicy: refused values are named, and the memory statement is true."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest

from gpupack.core import layout as L
from gpupack.core.config import EmitPolicy, PackerConfig
from gpupack.core.errors import ConfigError
from gpupack.packer.packer import Packer

MiB = 1 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size: expected an integer from 1 to 2147483647, got 0"),
        ({"vocab_size": 2**31}, r"vocab_size: expected .*, got 2147483648"),
        ({"vocab_size": 1.5}, r"vocab_size: expected an integer .*, got 1\.5"),
        ({"vocab_size": True}, r"vocab_size: expected an integer .*, got True"),
        ({"capacity": 0}, r"capacity: expected an integer from 1 to .*, got 0"),
        ({"capacity": 8, "max_batch": 9}, r"max_batch: expected an integer from 1 to 8, got 9"),
        ({"max_batch": 0}, r"max_batch: expected an integer from 1 to .*, got 0"),
        ({"window": 1}, r"window: expected .*, got 1"),
        ({"window": 100}, r"window: expected a power of two, got 100"),
        ({"window": 8, "max_accept": 8}, r"window: expected more than max_accept = 8, got 8"),
        ({"max_accept": 0}, r"max_accept: expected an integer from 1 to .*, got 0"),
        ({"max_in_flight": 0}, r"max_in_flight: expected an integer from 1 to 64, got 0"),
        ({"max_in_flight": 65}, r"max_in_flight: expected .*, got 65"),
        ({"stream_interval": 0}, r"stream_interval: expected .*, got 0"),
        ({"force_interval": -1}, r"force_interval: expected .*, got -1"),
        ({"device": "tpu"}, r"device: expected .*, got 'tpu'"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackerConfig(**{"vocab_size": 100, **change})


@pytest.mark.parametrize("name", ["stream_rule", "force_rule"])
def test_refused_rule(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected 'modulo' or 'unsent', got 'always'"):
        EmitPolicy(**{name: "always"})


def test_memory_that_is_not_there_is_refused_before_it_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"capacity, max_batch, window: .*expected at most the machine's \d+"):
        PackerConfig(vocab_size=100, capacity=1 << 24, window=1 << 20)


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        PackerConfig(vocab_size=100).window = 8  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        EmitPolicy().send_empty = True  # type: ignore[misc]


def test_state_of_4096_requests_is_below_16_mib() -> None:
    assert PackerConfig(vocab_size=100, capacity=4096, window=256).state_bytes < 16 * MiB


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize(("capacity", "window", "max_batch"), [(4096, 256, 64), (5, 4, 3), (33, 16, None)])
def test_memory_statement_is_what_is_allocated(
    logprobs: bool, capacity: int, window: int, max_batch: int | None
) -> None:
    extras = {"max_top_logprobs": 3, "max_token_ids_logprobs": 1, "speculative": True} if logprobs else {}
    config = PackerConfig(100, capacity=capacity, window=window, max_batch=max_batch, logprobs=logprobs, **extras)
    backend = Packer(config).backend
    assert backend.arenas.nbytes == config.state_bytes
    assert sum(buffer.nbytes for buffer in backend._free) == config.buffer_bytes
    assert config.memory_bytes >= config.state_bytes + config.buffer_bytes


def test_every_step_fits_its_buffer() -> None:
    """The fullest step: every backlog at its limit, every run at its longest, all of it sent."""
    from gpupack.core.request import Request

    config = PackerConfig(100, capacity=3, window=8, max_accept=3, max_in_flight=2)
    packer = Packer(config)
    handles = packer.admit([Request(f"r{i}", return_logprob=True, stream_interval=1000) for i in range(3)])
    first = dict(accept_lens=np.array([1, 1, 1]), logprobs=np.zeros((3, 3), np.float32))
    packer.step(handles, np.zeros((3, 3), np.int32), **first).wait().release()
    assert config.backlog_limit == 3 + 2
    for length in (3, 2):
        lens = np.full(3, length, np.int32)
        packed = packer.step(
            handles, np.ones((3, 3), np.int32), accept_lens=lens, logprobs=np.zeros((3, 3), np.float32)
        ).wait()
        assert packed.rows == 0
        packed.release()
    packed = packer.step(
        handles, np.ones((3, 3), np.int32), accept_lens=lens + 1, logprobs=np.ones((3, 3), np.float32)
    ).wait()
    most = config.backlog_limit + config.max_accept
    assert (packed.header(L.H_EARLY), packed.header(L.H_TOKENS), packed.header(L.H_LOGPROBS)) == (3, 3 * most, 3 * most)
    assert most == config.max_items


@pytest.mark.parametrize(
    ("policy", "bits"),
    [
        (EmitPolicy(), "STREAM_UNSENT FORCE_UNSENT HOLD_FORCED SKIP_EMPTY LOGPROB_EXISTING"),
        (EmitPolicy.sglang_0_5_16(), ""),
        (EmitPolicy.sglang_0_5_23(), "STREAM_UNSENT RETRACTED_LOGPROBS"),
        (EmitPolicy("unsent", "modulo", False, True, True, False), "STREAM_UNSENT FIRST_TOKEN_FLUSH LOGPROB_EXISTING"),
    ],
    ids=["default", "0.5.16", "0.5.23", "mix"],
)
def test_policy_bits(policy: EmitPolicy, bits: str) -> None:
    assert policy.bits == sum(getattr(L, f"POLICY_{name}") for name in bits.split())


def test_each_option_is_a_bit_of_its_own() -> None:
    base = EmitPolicy("modulo", "modulo", False, False, False, False)
    changed = [
        EmitPolicy(**{field.name: getattr(base, field.name) for field in fields(base)} | {field.name: other})
        for field in fields(base)
        for other in (["unsent"] if field.name.endswith("_rule") else [True])
    ]
    differences = [policy.bits ^ base.bits for policy in changed]
    assert len(set(differences)) == len(fields(EmitPolicy))
    assert all(difference.bit_count() == 1 for difference in differences)


def test_a_kernel_that_cannot_be_compiled_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpupack import Packer
    from gpupack.backends.cuda import backend
    from gpupack.backends.cuda.host_runtime import HostRuntime

    class Unable(HostRuntime):
        def prepare(self, *arguments: object) -> None:
            raise RuntimeError("ptxas: no such target")

    monkeypatch.setattr(backend, "make_runtime", lambda *_, **__: Unable())
    with pytest.raises(
        ConfigError, match=r"device: expected .* compiles, 'cuda' gave RuntimeError: ptxas.*device='cpu'"
    ):
        Packer(PackerConfig(100, device="cuda"))
