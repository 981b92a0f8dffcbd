"""The converter to sglang's messages, so far as it needs no sglang: by field lists like the package's own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import pytest

from gpupack.core.errors import ConfigError
from gpupack.sglang.payload import Payloads, Plan
from gpupack.transport.message_columns import EmbeddingColumns


class Message(msgspec.Struct, kw_only=True):
    """Fields that we fill, one that is always none, one that we do not know and that has a default."""

    rids: list[str]
    embeddings: list[Any]
    placeholder_tokens_idx: list[int] | None
    beam_width: int = 4
    prompt_tokens: list[int] | None = None


class Stranger(Message, kw_only=True):
    """One more that we do not know, and that has none."""

    moon_phase: int


def columns() -> EmbeddingColumns:
    return EmbeddingColumns(["a"], [None], [None], [[1.0]], [3], [0], [None], [0], [None])


def test_a_message_takes_its_own_fields_and_nothing_else():
    plan = Plan.of(Message, EmbeddingColumns, "package 1")
    message = plan.make(columns(), {"embeddings": lambda rows: [[*row, 2.0] for row in rows]})
    assert message == Message(
        rids=["a"], embeddings=[[1.0, 2.0]], placeholder_tokens_idx=None, beam_width=4, prompt_tokens=[3]
    )
    assert "time_stats" in plan.dropped
    assert "rids" not in plan.dropped


def test_an_unknown_required_field_names_itself_and_the_version():
    with pytest.raises(ConfigError, match=r"Stranger\.moon_phase: .* package 9\.9"):
        Plan.of(Stranger, EmbeddingColumns, "package 9.9")


def test_a_column_that_is_absent_stays_absent():
    plan = Plan.of(Message, EmbeddingColumns, "package 1")
    given = columns()
    given.prompt_tokens = None  # type: ignore[assignment]
    assert plan.make(given, {"prompt_tokens": len}).prompt_tokens is None


def test_importing_it_loads_nothing_of_sglang():
    code = "import sys, gpupack.sglang, gpupack.sglang.payload; print('sglang' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.split() == ["False", "False"]


def test_without_sglang_it_says_so():
    try:
        version("sglang")
    except PackageNotFoundError:
        with pytest.raises(ConfigError, match="sglang: expected an installed version"):
            Payloads()
    else:
        pytest.skip("sglang is installed here: see tests/sglang")
