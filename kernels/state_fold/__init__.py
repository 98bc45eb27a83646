"""Advances states S_t = exp(a_t) S_{t-1} + u_t k_t^T over the tokens that were kept; serves Mamba-2 and delta nets."""

from __future__ import annotations

import torch

from kernels.registry import implementation
from kernels.state_fold import reference


def fold(
    state: torch.Tensor,
    log_decay: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    path: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """The state after consuming nodes path[i, :count[i]], as a new tensor [n, H, V, K].

    state [n, H, V, K] float32, log_decay [n, T, H], u [n, T, H, V], k [n, T, G, K] (head h reads group h // (H // G)),
    path [n, P] int64, count [n] integer, 0 <= count <= P. Entries of `path` from count on, and nodes not on the path,
    may hold anything. Where count is 0 the state comes back unchanged.
    """
    run = implementation("state_fold.fold", state.device.type, reference.fold)
    return run(state, log_decay, u, k, path, count)
