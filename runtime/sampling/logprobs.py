"""Log-probabilities of the model's own distribution: what it believed, before any processor."""

from __future__ import annotations

import torch

from runtime.sampling.ranking import rank_keys, token_of


def logprobs_of(
    logits: torch.Tensor, targets: torch.Tensor, *, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 logits [m, vocab], targets [m] -> chosen [m], top_tokens [m, n] and top_values [m, n], best first."""
    logprobs = torch.log_softmax(logits, dim=1)
    vocab_size = logits.shape[1]
    top_tokens = token_of(rank_keys(logits).topk(min(num_top, vocab_size), dim=1).values, vocab_size)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), top_tokens, logprobs.gather(1, top_tokens)
