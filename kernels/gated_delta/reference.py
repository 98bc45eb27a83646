"""Torch implementation of the gated delta rule: within a chunk, the u are one triangular solve."""

from __future__ import annotations

import torch

from kernels.state_fold.reference import unroll
from kernels.tree import relative_decay

EPSILON = 1e-6


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.gated_delta.scan`."""
    n, T, Hv, V = v.shape
    Hk, K = k.shape[2:]
    y = torch.empty_like(v)
    for start in range(0, T, chunk):
        part = slice(start, start + chunk)
        y[:, part], a, u, key = block(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], state, None)
        path = a.cumsum(1, dtype=torch.float64)
        left = (path[:, -1:] - path).to(a.dtype).exp_()  # decay from each token to the chunk's end
        updates = (u * left.unsqueeze(3)).view(n, a.shape[1], Hk, Hv // Hk * V).permute(0, 2, 3, 1) @ key.transpose(
            1, 2
        )
        decay = path[:, -1].to(a.dtype).exp_()
        state = torch.addcmul(updates.view(n, Hv, V, K), state, decay[:, :, None, None])
    return y, state.clone() if T == 0 else state


def steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.gated_delta.steps`."""
    y, log_decay, u, key = block(q, k, v, g, beta, state, parents)
    return y, unroll(state, log_decay, u, key, parents, out)


def block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.gated_delta.block`."""
    n, T, Hv, V = v.shape
    Hk, K = k.shape[2:]
    R = Hv // Hk
    # The query's scale waits for y.
    both = torch.cat([q, k], 1).to(state.dtype)
    unit = both * torch.linalg.vector_norm(both, dim=3, keepdim=True).square_().add_(EPSILON).rsqrt_()
    key = unit[:, T:]
    a = g.to(state.dtype)
    total, pair = relative_decay(a, parents)
    both = unit.transpose(1, 2)  # one pass over the state answers queries and keys
    read = (both @ state.reshape(n, Hk, R * V, K).transpose(2, 3)).view(n, Hk, 2, T, R, V).permute(0, 2, 1, 4, 3, 5)
    read = read * total.view(n, 1, Hk, R, T, 1)
    scores = (both @ key.permute(0, 2, 3, 1)).view(n, Hk, 2, 1, T, T)
    pair = pair.view(n, Hk, R, T, T)
    weight = beta.to(state.dtype).view(n, T, Hk, R, 1).permute(0, 2, 3, 1, 4)
    u = read.new_empty(n, Hk, R, T, V)
    torch.sub(v.to(state.dtype).view(n, T, Hk, R, V).permute(0, 2, 3, 1, 4), read[:, 1], out=u)
    u *= weight
    if T > 1:
        # (1 + lower) u = u', transposed: column-major is what the solver wants, and what a transpose of ours is.
        lower = (pair * scores[:, :, 1] * weight).transpose(3, 4)
        right = u.transpose(3, 4)
        u = torch.linalg.solve_triangular(lower, right, upper=True, left=False, unitriangular=True).transpose(3, 4)
    y = ((pair * scores[:, :, 0]) @ u).add_(read[:, 0]).mul_(K**-0.5)
    y, u = (each.reshape(n, Hv, T, V).transpose(1, 2) for each in (y, u))
    return y.to(v.dtype), a, u.contiguous(), key
