"""Torch implementation of the fold: one rank-P update per head."""

from __future__ import annotations

import torch


def fold(
    state: torch.Tensor,
    log_decay: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    path: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.state_fold.fold`."""
    n, H, V, K = state.shape
    G = k.shape[2]
    P = path.shape[1]
    if P == 0 or log_decay.shape[1] == 0:
        return state.clone()
    rows = torch.arange(n, device=state.device).unsqueeze(1)
    unused = torch.arange(P, device=state.device) >= count.unsqueeze(1)
    node = path.masked_fill(unused, 0)
    skip = unused[:, :, None, None]
    a = log_decay[rows, node].masked_fill(unused.unsqueeze(2), 0.0).cumsum(1, dtype=torch.float64)
    left = (a[:, -1:] - a).to(state.dtype).exp_()  # decay from each token to the end of the path
    update = u[rows, node].masked_fill_(skip, 0.0).to(state.dtype) * left.unsqueeze(3)
    key = k[rows, node].masked_fill_(skip, 0.0).to(state.dtype)
    out = (state * a[:, -1].to(state.dtype).exp_()[:, :, None, None]).reshape(n * G, H // G * V, K)
    out.baddbmm_(
        update.view(n, P, G, H // G * V).permute(0, 2, 3, 1).reshape(n * G, H // G * V, P),
        key.transpose(1, 2).reshape(n * G, P, K),
    )
    return out.view(n, H, V, K)
