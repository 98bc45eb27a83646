"""Torch implementation of the fold: one rank-P update per head."""

from __future__ import annotations

import torch


def fold(
    state: torch.Tensor,
    log_decay: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    path: torch.Tensor | None,
    count: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.state_fold.fold`."""
    n, H, V, K = state.shape
    G = k.shape[2]
    P = log_decay.shape[1] if path is None else path.shape[1]
    if P == 0 or log_decay.shape[1] == 0:
        return state.clone()
    unused = torch.arange(P, device=state.device) >= count.unsqueeze(1)
    if path is not None:
        rows = torch.arange(n, device=state.device).unsqueeze(1)
        node = path.masked_fill(unused, 0)
        log_decay, u, k = log_decay[rows, node], u[rows, node], k[rows, node]
    # What is not consumed may be NaN, so it is replaced, not multiplied by 0.
    a = log_decay.to(state.dtype).masked_fill(unused.unsqueeze(2), 0.0)
    skip = unused[:, :, None, None]
    # Row 0: the decay of the whole path; row 1 + j: of what follows its node j. Sums, not differences of sums.
    decay = torch.matmul(a.new_ones(P + 1, P).triu(), a).exp_()
    update = u.to(state.dtype).masked_fill(skip, 0.0) * decay[:, 1:].unsqueeze(3)
    key = k.to(state.dtype).masked_fill(skip, 0.0)
    out = (state * decay[:, 0, :, None, None]).reshape(n * G, H // G * V, K)
    out.baddbmm_(
        update.reshape(n, P, G, H // G * V).permute(0, 2, 3, 1).reshape(n * G, H // G * V, P),
        key.transpose(1, 2).reshape(n * G, P, K),
    )
    return out.view(n, H, V, K)


def unroll(
    state: torch.Tensor,
    log_decay: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See `kernels.state_fold.unroll`."""
    n, T, H, V = u.shape
    G, K = k.shape[2:]
    if out is None:
        out = state.new_empty(n, T, H, V, K)
    decay = log_decay.to(state.dtype).exp()[:, :, :, None, None]
    column = u.to(state.dtype).reshape(n, T, G, H // G, V, 1)
    row = k.to(state.dtype)[:, :, :, None, None]
    rows = torch.arange(n, device=state.device)
    before = state
    for t in range(T):
        if parents is not None:
            parent = parents[:, t]
            before = torch.where((parent < 0)[:, None, None, None], state, out[rows, parent.clamp(min=0)])
        after = out[:, t]
        torch.mul(before, decay[:, t], out=after)
        after.view(n, G, H // G, V, K).addcmul_(column[:, t], row[:, t])
        before = after
    return out
