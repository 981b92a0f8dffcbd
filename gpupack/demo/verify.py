"""What the receiver should have shown: one full decode of the sampled tokens, cut at their stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpupack.demo.prompts import Prompt


def expected_output(
    tokenizer: Any, prompt: Prompt, sampled: Sequence[int], eos_token_ids: Sequence[int]
) -> tuple[str, int]:
    """Text and number of output tokens of a request, from all tokens that the model sampled for it.

    Written without the packer: the first token count at which the decoded text has a stop string,
    else at an end-of-sequence id, else `max_new_tokens`. The stop string or id is not part of the text.
    """
    for count in range(1, min(len(sampled), prompt.max_new_tokens) + 1):
        text = tokenizer.decode(list(sampled[:count]), skip_special_tokens=True)
        places = [text.find(stop) for stop in prompt.stop if stop in text]
        if places:
            return text[: min(places)], count
        if sampled[count - 1] in eos_token_ids:
            return tokenizer.decode(list(sampled[: count - 1]), skip_special_tokens=True), count
    count = min(len(sampled), prompt.max_new_tokens)
    return tokenizer.decode(list(sampled[:count]), skip_special_tokens=True), count
