"""What the demo asks the model: prompts, lengths, intervals and stop strings that differ."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """One request of the demo."""

    rid: str
    text: str
    max_new_tokens: int
    stream_interval: int = 1
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    stream: bool = True


PROMPTS = (
    Prompt("rainbow", "Explain in two sentences how a rainbow forms.", 64),
    Prompt("count", "Count from one to ten in words, separated by commas.", 48, 4),
    Prompt("fox", "Write a short story about a fox who learns to read.", 96, 2, stop=(". ", ".\n")),
    Prompt("tea", "List three kinds of tea.", 56, 8, stop=("\n3",)),
    Prompt("capital", "What is the capital of France? Answer in one sentence.", 24),
    Prompt("emoji", "Describe the ocean to a child, in one paragraph.", 72, 3, temperature=0.7),
    Prompt("python", "Write a Python function that adds two numbers.", 80, 1, stop=("return a + b",)),
    Prompt("batch", "Why do servers batch requests? One paragraph.", 64, 16, stream=False),
    Prompt("haiku", "Write a haiku about winter.", 40, 1, temperature=0.9),
    Prompt("planets", "Name the planets of the solar system.", 64, 5, stop=("Saturn", "Pluto")),
    Prompt("short", "Say hello.", 1),
    Prompt("gravity", "What is gravity?", 60, 6),
)
