"""Random requests of the real package, as its scheduler makes them from what a client asked."""

from __future__ import annotations

import warnings
from array import array
from typing import Any

import numpy as np
from real import NEWER, Setting

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 49_152
TEXT = (
    "The quick brown fox, été à la mode, jumps 🙂 over 你好 the lazy dog; then UNO DUE TRE!! and WXYZ ends it. "
    "A smile 🙂🙃 is <|im_start|>worth more.\n\nNext line 1234 5678 and no end"
)
STOPS = (" brown", "WXYZ", "TRE!!", " fox, é", "🙂", "dog; then", "\n\n", " la mode, ju", "no such text")
REGEXES = ("[0-9]{4}", "worth m.re", "jumps? ")
WORKERS = ("ipc:///worker-0", "ipc:///worker-1")


class Newcomers:
    """Makes requests; every one has its own mix of what can be asked for."""

    def __init__(self, rng: np.random.Generator, setting: Setting, tokenizer: Any, name: str) -> None:
        self.name = name
        self.rng, self.setting, self.tokenizer = rng, setting, tokenizer
        self.text = tokenizer.encode(TEXT)
        self.made = 0

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def tokens(self, n: int) -> list[int]:
        return [int(token) for token in self.rng.choice(self.text, n)]

    def _sampling(self) -> Any:
        rng, stops = self.rng, {}
        if self.chance(0.3):
            stops["stop"] = [str(text) for text in rng.choice(STOPS, int(rng.integers(1, 4)), replace=False)]
        if self.chance(0.08):
            stops["stop_regex"] = [str(rng.choice(REGEXES))]
        if self.chance(0.15):
            stops["stop_token_ids"] = self.tokens(int(rng.integers(1, 3)))
        cap = 0 if self.chance(0.06) else int(rng.choice([1, 2, 5, 20, 60, 130, 200]))
        params = SamplingParams(
            max_new_tokens=cap,
            ignore_eos=self.chance(0.5),
            skip_special_tokens=self.chance(0.7),
            spaces_between_special_tokens=self.chance(0.8),
            no_stop_trim=self.chance(0.3),
            stream_interval=int(rng.choice([1, 2, 3, 5, 8])) if self.chance(0.5) else None,
            **stops,
        )
        params.normalize(self.tokenizer)
        return params

    def make(self) -> Any:
        """A request that has not run."""
        rng, setting = self.rng, self.setting
        unpadded = array("q", self.tokens(int(rng.choice([1, 2, 4, 5, 6, 9, 20]))))
        wants = setting.logprobs and setting.is_generation and self.chance(0.5)
        self.made += 1
        req = Req(
            f"{self.name}r{self.made}",
            "",
            array("q", unpadded),
            self._sampling(),
            return_logprob=wants,
            top_logprobs_num=int(rng.choice([0, 0, 1, 2, 5])) if wants else 0,
            token_ids_logprob=self.tokens(int(rng.integers(1, 4))) if wants and self.chance(0.4) else None,
            stream=self.chance(0.75),
            origin_input_ids_unpadded=unpadded,
            return_hidden_states=self.chance(0.1),
            return_routed_experts=self.chance(0.15),
            return_indexer_topk=self.chance(0.1),
            require_reasoning=self.chance(0.3),
            eos_token_ids={self.tokenizer.eos_token_id, self.text[3]},
            vocab_size=VOCAB,
            http_worker_ipc=str(rng.choice(WORKERS)) if self.chance(0.5) else None,
            return_pooled_hidden_states=self.chance(0.4),
        )
        req.tokenizer = self.tokenizer
        self._cache(req)
        self._media(req)
        if self.chance(0.1):
            req.decoded_text = "So far: "
        return req

    def _cache(self, req: Any) -> None:
        """Cached tokens, in total and by tier."""
        if self.chance(0.5):
            return
        tiers = [int(n) for n in self.rng.integers(0, 4, 3)]
        if self.chance(0.4):
            tiers[2] = 0
        if self.chance(0.7):
            req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage = tiers
            req.cached_tokens = sum(tiers)
        else:
            req.cached_tokens = int(self.rng.integers(0, 9))

    def _media(self, req: Any) -> None:
        """Counts that a prefill server has sent, media of the prompt, or neither."""
        if self.chance(0.15):
            req.mm_image_tokens, req.mm_audio_tokens, req.mm_video_tokens = (int(n) for n in self.rng.integers(0, 5, 3))
            if NEWER:
                req.mm_token_counts_ready = True
        elif self.chance(0.15):
            items = [
                MultimodalDataItem(modality=modality, offsets=[(0, int(self.rng.integers(0, 6)))])
                for modality in (Modality.IMAGE, Modality.AUDIO, Modality.VIDEO)
                if self.chance(0.6)
            ]
            req.multimodal_inputs = MultimodalInputs(mm_items=items)


def media_counts(req: Any) -> tuple[int, int, int]:
    """Image, audio and video tokens of the prompt, as the package counts them."""
    if NEWER:
        return req.get_mm_token_counts()
    stored = (req.mm_image_tokens, req.mm_audio_tokens, req.mm_video_tokens)
    if any(stored) or not req.multimodal_inputs:
        return stored if any(stored) else (0, 0, 0)
    return req.multimodal_inputs.compute_mm_token_counts()
