"""Trees of draft tokens: `parents` [n, T] int64, -1 for a child of the committed state; parents precede children."""

from __future__ import annotations

import torch


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """[n, T, T] float32 of 0 and 1: entry (t, s) says that s is t or an ancestor of t. Runs without a loop over T."""
    T = parents.shape[1]
    index = torch.arange(T, device=parents.device)
    hop = (parents.unsqueeze(2) == index).float()
    closure = hop + (index.unsqueeze(1) == index)
    reach = 2
    while reach < T:  # sum_k hop^k as a product of (1 + hop^(2^i)); every entry stays 0 or 1, for paths are unique
        hop = hop @ hop
        closure = closure + closure @ hop
        reach *= 2
    return closure


def relative_decay(log_decay: torch.Tensor, parents: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays within a block of tokens: from the initial state, and between every two tokens.

    log_decay [n, T, H]. Returns `total` [n, H, T] (the product of decays on t's path, t included) and `pair`
    [n, H, T, T] (the decay that s's update has undergone when t is reached; 0 unless s is t or an ancestor of t).

    Sums are float64: their differences are small numbers between large ones.
    """
    a = log_decay.transpose(1, 2)
    if a.shape[2] == 1:  # a root; plain decoding comes here
        return a.exp(), torch.ones_like(a).unsqueeze(3)
    if parents is None:
        path = a.cumsum(2, dtype=torch.float64)
        pair = (path.unsqueeze(3) - path.unsqueeze(2)).to(a.dtype).exp_().tril_()
    else:
        related = ancestors(parents)
        path = a.double() @ related.double().transpose(1, 2)
        pair = (path.unsqueeze(3) - path.unsqueeze(2)).to(a.dtype).exp_()
        pair = pair.masked_fill_((related == 0).unsqueeze(1), 0.0)
    return path.to(a.dtype).exp_(), pair
