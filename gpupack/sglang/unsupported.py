"""What the plugin leaves to the engine's own streamer, and why."""

from __future__ import annotations

from typing import Any

# Attribute of a request, and why one that has it is left to the engine; a version may lack the attribute.
_FEATURES = (
    ("beam_group", "beam search"),
    ("return_sampling_mask", "sampling masks"),
    ("return_flat_raw_top_logprobs", "flat input top logprobs"),
    ("dllm_config", "diffusion LM"),
)


def why_unsupported(req: Any) -> str | None:
    """Why a request goes through the engine's own streamer; None: it does not."""
    for name, reason in _FEATURES:
        if getattr(req, name, None):
            return reason
    if req.input_embeds is not None:  # a retraction drops its output and leaves its cursors
        return "input embeddings"
    if isinstance(req.return_hidden_states, str):
        return "hidden states of the last token"
    return None


def why_engine_unsupported(streamer: Any, pp_size: int, backend: str) -> str | None:
    """Why no batch of this engine goes through gpupack; None: they do."""
    if backend == "engine":
        return "asked for"
    if not streamer.is_generation:
        return "embedding model"
    if pp_size > 1:
        return "pipeline parallel"
    if getattr(streamer, "rust_server", None) is not None:
        return "Rust server"
    if getattr(streamer.server_args, "dllm_algorithm", None) is not None:
        return "diffusion LM"
    return None
