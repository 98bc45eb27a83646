"""Torch implementation of Mamba-2: a chunk of tokens as a few batched matrix products."""

from __future__ import annotations

import torch

from kernels.state_fold.reference import unroll
from kernels.tree import relative_decay


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.mamba2.scan`."""
    n, T, H, P = x.shape
    G, N = B.shape[2:]
    y = torch.empty_like(x)
    for start in range(0, T, chunk):
        part = slice(start, start + chunk)
        y[:, part], a, u, k = block(x[:, part], dt[:, part], A, B[:, part], C[:, part], D, state, None)
        path = a.cumsum(1, dtype=torch.float64)
        left = (path[:, -1:] - path).to(a.dtype).exp_()  # decay from each token to the chunk's end
        updates = (u * left.unsqueeze(3)).view(n, a.shape[1], G, H // G * P).permute(0, 2, 3, 1) @ k.transpose(1, 2)
        decay = path[:, -1].to(a.dtype).exp_()
        state = torch.addcmul(updates.view(n, H, P, N), state, decay[:, :, None, None])
    return y, state.clone() if T == 0 else state


def steps(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.mamba2.steps`."""
    y, log_decay, u, k = block(x, dt, A, B, C, D, state, parents)
    return y, unroll(state, log_decay, u, k, parents, out)


def block(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.mamba2.block`."""
    n, T, H, P = x.shape
    G, N = B.shape[2:]
    R = H // G
    a, u, k, q = _inputs(x, dt, A, B, C, state.dtype)
    total, pair = relative_decay(a, parents)
    q = q.transpose(1, 2)
    read = (q @ state.reshape(n, G, R * P, N).transpose(2, 3)).view(n, G, T, R, P).transpose(2, 3)
    scores = (q @ k.permute(0, 2, 3, 1)).unsqueeze(2)
    y = (pair.view(n, G, R, T, T) * scores) @ u.view(n, T, G, R, P).permute(0, 2, 3, 1, 4)
    y.addcmul_(read, total.view(n, G, R, T, 1))
    y = y.view(n, H, T, P).transpose(1, 2).addcmul(x.to(y.dtype), D[:, None])
    return y.to(x.dtype), a, u, k


def _inputs(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log decay, u, k and q of the common form, in the state's dtype."""
    dt = dt.to(dtype)
    return dt * A, dt.unsqueeze(3) * x.to(dtype), B.to(dtype), C.to(dtype)
