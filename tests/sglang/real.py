"""The real package under a configuration: its streamer, its requests' classes, its detokenizer.

Nothing of it is replaced. Configuration goes in where the package takes it: `ServerArgs`, its published
context and its parallel state; what the streamer gets as arguments is built here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before the package is imported: it runs on a CPU here, with the stand-ins of its environment.
os.environ.update(
    SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    SGLANG_CPU_STUBS="torchvision", SGLANG_CPU_EXIST_OK="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1",
)  # fmt: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about hardware that is not here
    from sglang.srt import runtime_context
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager
    from sglang.srt.managers.scheduler_components import output_streamer
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
    from sglang.srt.server_args import PortArgs, ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

VERSION = version("sglang")
NEWER = VERSION == "0.5.23"
MODELS = Path(os.environ.get("GPUPACK_SGLANG_MODELS", "")).resolve()
MODEL = MODELS / "nano"


@dataclass(frozen=True)
class Setting:
    """What a life's engine is configured to."""

    name: str = "plain"
    speculative: bool = False
    decode_server: bool = False
    is_generation: bool = True
    stream_interval: int = 1
    dp_rank: int = 0
    attn_tp_rank: int = 0
    storage_tier: str | None = None
    log_time_stats: bool = False
    logprobs: bool = True


class DiskBackend:
    """A storage tier; only the name of its class is looked at."""


STORAGE = {None: lambda: None, "none": lambda: None, "DiskBackend": DiskBackend}  # tier off; on without a backend; on


def server_args(**more: Any) -> Any:
    """The package's own arguments for the small model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ServerArgs(
            model_path=str(MODEL), device="cpu", attention_backend="torch_native", disable_cuda_graph=True, **more
        )


_ARGS: list[Any] = []


def shared_args() -> Any:
    """Arguments that were published once for this process."""
    if not _ARGS:
        _ARGS.append(server_args())
        if NEWER:
            runtime_context.publish(_ARGS[0], role="scheduler")
        else:
            runtime_context.get_context().set_server_args(_ARGS[0])
    return _ARGS[0]


@dataclass
class Outbox:
    """Where the streamer sends: keeps the newest message."""

    message: Any = None

    def send_output(self, message: Any) -> None:
        self.message = message


@dataclass
class RealStreamer:
    """The package's streamer under a setting; each call returns the message that it sent, or None."""

    setting: Setting
    outbox: Outbox = field(default_factory=Outbox)
    kind: Any = output_streamer.SchedulerOutputStreamer

    def __post_init__(self) -> None:
        setting, args = self.setting, shared_args()
        controller = SimpleNamespace(storage_backend=STORAGE[setting.storage_tier]())
        more: dict[str, Any] = {}
        if not NEWER:
            from sglang.srt.distributed.parallel_state_wrapper import ParallelState

            more["ps"] = ParallelState.trivial(dp_rank=setting.dp_rank, attn_tp_rank=setting.attn_tp_rank)
            args = SimpleNamespace(
                stream_interval=setting.stream_interval, enable_request_time_stats_logging=setting.log_time_stats
            )
        self.streamer = self.kind(
            send_to_detokenizer=self.outbox,
            tree_cache=SimpleNamespace(cache_controller=controller),
            server_args=args,
            is_generation=setting.is_generation,
            spec_algorithm=SpeculativeAlgorithm.EAGLE if setting.speculative else SpeculativeAlgorithm.NONE,
            disaggregation_mode=DisaggregationMode.DECODE if setting.decode_server else DisaggregationMode.NULL,
            enable_hicache_storage=lambda: setting.storage_tier is not None,
            **more,
        )

    def stream(self, reqs: list[Any], return_logprob: bool, skip_req: Any = None, *, idle: bool = False) -> Any:
        """One call, as the scheduler makes it after a step."""
        self.outbox.message = None
        with ExitStack() as stack:
            if NEWER:
                setting, ranks = self.setting, self.setting.attn_tp_rank + 1
                stack.enter_context(
                    runtime_context.get_parallel().override(
                        dp_rank=setting.dp_rank, attn_tp_rank=ranks - 1, tp_rank=ranks - 1,
                        attn_tp_size=ranks, tp_size=ranks, moe_tp_size=ranks,
                    )
                )  # fmt: skip
                runtime_context.get_context().override(
                    "tests",
                    stream_interval=setting.stream_interval,
                    enable_request_time_stats_logging=setting.log_time_stats,
                )
            if idle:
                self.streamer._stream_output_generation(reqs, return_logprob, is_idle_batch=True)
            else:
                self.streamer.stream_output(reqs, return_logprob, skip_req)
        return self.outbox.message


def tokenizer() -> Any:
    """The real tokenizer, as the package loads it."""
    return get_tokenizer(str(MODEL))


@contextmanager
def detokenizer() -> Iterator[Any]:
    """A detokenizer of the package, as its process makes it; its sockets are closed at the end."""
    args = shared_args()
    manager = DetokenizerManager(args, PortArgs.init_new(args))
    yield manager
    for socket in (manager.recv_from_scheduler, manager.send_to_tokenizer):
        socket.close(0)
    manager.recv_from_scheduler.context.term()


def sender(socket: Any) -> Any:
    """The package's own sender on a socket."""
    return SenderWrapper(socket)


__all__ = ["NEWER", "VERSION", "RealStreamer", "Setting", "detokenizer", "io_struct", "sender", "tokenizer"]
