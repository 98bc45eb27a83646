"""Advances states S_t = exp(a_t) S_{t-1} + u_t k_t^T over tokens whose updates are known; Mamba-2 and delta nets alike.

Shapes: state [n, H, V, K] float32, log_decay [n, T, H], u [n, T, H, V], k [n, T, G, K]; head h reads group
h // (H // G). The state passed in is never written.
"""

from __future__ import annotations

import torch

from kernels.registry import implementation
from kernels.state_fold import reference


def fold(
    state: torch.Tensor,
    log_decay: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    path: torch.Tensor | None,
    count: torch.Tensor,
) -> torch.Tensor:
    """The state after nodes path[i, :count[i]], or after the first count[i] tokens of a chain (path None).

    path [n, P] int64 or None, count [n] integer, 0 <= count <= P (T without a path). Entries of `path` from count on,
    and nodes not consumed, may hold anything. Returns a new tensor [n, H, V, K]; where count is 0, an equal state.
    """
    run = implementation("state_fold.fold", state.device.type, reference.fold)
    return run(state, log_decay, u, k, path, count)


def unroll(
    state: torch.Tensor,
    log_decay: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    parents: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The state after every node along its own path: [n, T, H, V, K], written to `out` if given.

    parents [n, T] int64 or None for a chain: see `kernels.tree`. `out` may have any strides.
    """
    run = implementation("state_fold.unroll", state.device.type, reference.unroll)
    return run(state, log_decay, u, k, parents, out)
