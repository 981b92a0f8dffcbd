"""Sampling for a batch whose rows differ in temperature."""

import torch
from torch import Tensor


def sample(logits: Tensor, temperature: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw one token per row, greedily where the temperature is 0.

    Parameters
    ----------
    logits : float tensor ``[n, vocab]``
        Not changed. ``-inf`` bans a token.
    temperature : float tensor ``[n]``, on the logits' device
        Finite and not negative. The values are the caller's duty: looking at them would synchronise.
    generator : torch.Generator on the logits' device, or None for torch's default one
        One number per row, greedy rows included: a row's draw does not depend on its neighbours' temperatures.

    Returns
    -------
    token_ids : int64 ``[n]``
    logprobs : float32 ``[n]``
        Natural logarithm of the chosen token's probability under ``softmax(logits)``, before temperature.

    Raises
    ------
    ValueError
        If the shapes or devices do not fit together, or ``vocab`` is 0.

    Works on the current stream of the logits' device and does not synchronise.
    """
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits: expected shape [n, vocab] with vocab > 0, got {list(logits.shape)}")
    if temperature.shape != logits.shape[:1]:
        raise ValueError(f"temperature: expected shape [{logits.shape[0]}], got {list(temperature.shape)}")
    if temperature.device != logits.device:
        raise ValueError(f"temperature: expected device {logits.device}, got {temperature.device}")
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    sampled = temperature > 0
    # Greedy rows go through the draw as well: leaving them out would need a look at the temperatures.
    probs = torch.softmax(logits.float() / torch.where(sampled, temperature, 1.0)[:, None], dim=-1)
    # Inverse of the distribution function, in float64 because float32 sums over a vocabulary lose the rare tokens. One
    # random number per row; noise for each logit (multinomial, Gumbel) took five times as long as all of this on a CPU.
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    point = torch.rand((len(cdf), 1), dtype=torch.float64, device=cdf.device, generator=generator) * cdf[:, -1:]
    # right=True: the first token whose sum passes the point, so none of probability 0. The bound is for NaN logits.
    drawn = torch.searchsorted(cdf, point, right=True).squeeze(1).clamp_max(logits.shape[1] - 1)
    token_ids = torch.where(sampled, drawn, logits.argmax(dim=-1))
    return token_ids, logprobs.gather(1, token_ids[:, None]).squeeze(1)
