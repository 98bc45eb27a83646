"""Torch implementation of the causal convolution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional


def conv_block(
    x: torch.Tensor,
    window: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parents: torch.Tensor | None,
) -> torch.Tensor:
    """See `kernels.causal_conv1d.conv_block`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(dtype)
    inputs = torch.cat([window.transpose(1, 2).to(dtype), x.to(dtype)], 1)
    last = weight.shape[1] - 1
    out = inputs[:, last:] * weight[:, last]
    if bias is not None:
        out += bias
    if parents is None:
        T = x.shape[1]
        for j in range(last):
            out.addcmul_(inputs[:, j : j + T], weight[:, j])
    else:
        for hop, at in enumerate(_predecessors(parents, last, last), 1):
            out.addcmul_(_rows(inputs, at), weight[:, last - hop])
    return functional.silu(out, inplace=True).to(x.dtype)


def conv_window(x: torch.Tensor, window: torch.Tensor, path: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """See `kernels.causal_conv1d.conv_window`."""
    columns = window.shape[2]
    if path.shape[1] == 0 or x.shape[1] == 0 or columns == 0:
        return window.clone()
    at = torch.arange(columns, device=x.device) + count.unsqueeze(1)  # counted from the oldest column
    old = at < columns
    step = (at - columns).clamp_(0, path.shape[1] - 1)
    node = path.gather(1, step).masked_fill_(old, 0)
    kept = window.gather(2, at.clamp(max=columns - 1).unsqueeze(1).expand_as(window))
    new = _rows(x, node).transpose(1, 2).to(window.dtype)
    return torch.where(old.unsqueeze(1), kept, new)


def conv_windows_all(x: torch.Tensor, window: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
    """See `kernels.causal_conv1d.conv_windows_all`."""
    columns = window.shape[2]
    n, T, C = x.shape
    out = window.new_empty(n, T, C, columns)
    if columns == 0:
        return out
    inputs = torch.cat([window.transpose(1, 2), x.to(window.dtype)], 1)
    if parents is None:
        return out.copy_(inputs.unfold(1, columns, 1)[:, 1:])
    out[..., columns - 1] = x
    for hop, at in enumerate(_predecessors(parents, columns, columns - 1), 1):
        out[..., columns - 1 - hop] = _rows(inputs, at)
    return out


def _predecessors(parents: torch.Tensor, columns: int, hops: int) -> Iterator[torch.Tensor]:
    """Where each node's 1st, 2nd ... predecessor lies in window ++ x, the window having `columns`: `hops` of [n, T]."""
    n, T = parents.shape
    before = torch.arange(-1, columns - 1, device=parents.device).clamp_(min=0).expand(n, columns)
    table = torch.cat([before, parents + columns], 1)
    at = torch.arange(columns, columns + T, device=parents.device).expand(n, T)
    for _ in range(hops):
        at = table.gather(1, at)
        yield at


def _rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Picks rows `at` [n, M] of x [n, L, C]: [n, M, C]."""
    return x.gather(1, at.unsqueeze(2).expand(-1, -1, x.shape[2]))
