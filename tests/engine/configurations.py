"""Configurations of a real engine in which the plugin must change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

NO_OVERLAP = ("--disable-overlap-schedule",)
RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
# A grammar request, or token-ids logprobs of several requests at once, end this version's scheduler on a CPU, with
# or without the plugin.
SKIPPED = {"0.5.16": ("regex", "lpout"), "0.5.23": ()}


@dataclass(frozen=True)
class Configuration:
    """One engine, and what is expected of the plugin in it.

    Parameters
    ----------
    wire, backend
        GPUPACK_WIRE, GPUPACK_BACKEND.
    path
        Where most batches must go: "frames", "messages" or "engine".
    """

    name: str
    version: str = "0.5.23"
    wire: str = "compatible"
    backend: str = "host"
    path: str = "messages"
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    """Loaded with and without gpupack."""

    @property
    def skipped(self) -> tuple[str, ...]:
        """Requests of the golden workload that are left out."""
        return SKIPPED[self.version]

    @property
    def key(self) -> str:
        """The same for configurations whose engine without the plugin is the same."""
        return repr((self.version, self.arguments, sorted(self.environment.items()), self.plugins))


NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")

GOLDEN = [
    Configuration("0.5.23 native, overlap", wire="native", path="frames"),
    Configuration("0.5.23 compatible, no overlap", arguments=NO_OVERLAP),
    Configuration(
        "0.5.23 native, NGRAM, forced retraction",
        wire="native",
        path="frames",
        arguments=NGRAM,
        environment=RETRACTION,
        plugins=("cpu_spec",),
    ),
    Configuration("0.5.16 compatible", version="0.5.16"),
]

GOLDEN_FULL = [
    Configuration("0.5.23 compatible, overlap"),
    Configuration("0.5.23 native, no overlap", wire="native", path="frames", arguments=NO_OVERLAP),
    Configuration("0.5.23 native asked, two detokenizers", wire="native", arguments=("--detokenizer-worker-num", "2")),
    Configuration("0.5.16 native asked, no overlap", version="0.5.16", wire="native", arguments=NO_OVERLAP),
    Configuration(
        "0.5.23 device, NGRAM, forced retraction",
        backend="device",
        wire="native",
        path="frames",
        arguments=NGRAM,
        environment=RETRACTION,
        plugins=("cpu_spec",),
    ),
]
