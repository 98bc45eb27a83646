"""Torch implementation of the causal convolution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

FEW = 8  # tokens, from which on transposing the weight costs less than reading it with a stride


def conv_block(
    x: torch.Tensor,
    window: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parents: torch.Tensor | None,
) -> torch.Tensor:
    """See `kernels.causal_conv1d.conv_block`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    n, T, _ = x.shape
    taps = weight.to(dtype).t()
    if n * T > FEW:
        taps = taps.contiguous()
    inputs = torch.cat([window.transpose(1, 2).to(dtype), x.to(dtype)], 1)
    last = len(taps) - 1
    out = inputs[:, last:] * taps[last] if bias is None else torch.addcmul(bias, inputs[:, last:], taps[last])
    if parents is None:
        for j in range(last):
            out.addcmul_(inputs[:, j : j + T], taps[j])
    else:
        rows = _row_index(x)
        for hop, at in enumerate(_predecessors(parents, last, last), 1):
            out.addcmul_(inputs[rows, at], taps[last - hop])
    return functional.silu(out, inplace=True).to(x.dtype)


def conv_window(x: torch.Tensor, window: torch.Tensor, path: torch.Tensor | None, count: torch.Tensor) -> torch.Tensor:
    """See `kernels.causal_conv1d.conv_window`."""
    columns = window.shape[2]
    longest = x.shape[1] if path is None else path.shape[1]
    if longest == 0 or x.shape[1] == 0 or columns == 0:
        return window.clone()
    rows = _row_index(x)
    at = torch.arange(columns, device=x.device) + count.unsqueeze(1)  # counted from the oldest column
    old = at < columns
    node = (at - columns).clamp_(0, longest - 1)
    if path is not None:
        node = path.gather(1, node).masked_fill_(old, 0)
    kept = window.transpose(1, 2)[rows, at.clamp_(max=columns - 1)]
    return torch.where(old.unsqueeze(2), kept, x[rows, node].to(window.dtype)).transpose(1, 2)


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
    rows = _row_index(x)
    for hop, at in enumerate(_predecessors(parents, columns, columns - 1), 1):
        out[..., columns - 1 - hop] = inputs[rows, at]
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


def _row_index(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device).unsqueeze(1)
