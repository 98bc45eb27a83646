"""A strict order of tokens: by logit, and by lower id where logits are equal."""

from __future__ import annotations

import torch


def rank_keys(logits: torch.Tensor) -> torch.Tensor:
    """Distinct int64 keys [M, vocab], ordered as float32 logits [M, vocab] are; of equal logits the lower id is higher.

    Selecting by key is exact and unique whatever the algorithm; `topk` of the logits themselves breaks ties anyhow.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    vocab = logits.shape[-1]
    low = torch.arange(vocab - 1, -1, -1, dtype=torch.int64, device=logits.device)
    return (ordered.to(torch.int64) << 32) | low


def token_of(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The token ids of keys made by `rank_keys` for a vocabulary of this size."""
    return vocab_size - 1 - (keys & 0xFFFFFFFF)
