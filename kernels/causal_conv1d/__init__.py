"""Causal depthwise convolution with SiLU, as it stands before every recurrence, over chains and trees of tokens.

The window holds the last W - 1 raw inputs, oldest first. It is only read: what becomes of it is for the commit to say.
"""

from __future__ import annotations

import torch

from kernels.causal_conv1d import reference
from kernels.registry import implementation


def conv_block(
    x: torch.Tensor,
    window: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """silu(bias + sum_j weight[:, j] * input[t - (W - 1) + j]) for every token.

    x [n, T, C], window [n, C, W - 1], weight [C, W], bias [C] or None, parents [n, T] int64 or None. In a chain token
    t's inputs are window ++ x[:, :t + 1]; in a tree they are its own ancestors, then the window. Returns [n, T, C] in
    x's dtype, summed in at least float32.
    """
    run = implementation("causal_conv1d.conv_block", x.device.type, reference.conv_block)
    return run(x, window, weight, bias, parents)


def conv_window(x: torch.Tensor, window: torch.Tensor, path: torch.Tensor | None, count: torch.Tensor) -> torch.Tensor:
    """The window after consuming nodes path[i, :count[i]], or the first count[i] tokens of a chain (path None).

    x [n, T, C], window [n, C, W - 1], path [n, P] int64 or None, count [n] integer, 0 <= count <= P (T without a
    path). Entries of `path` from count on, and tokens not consumed, may hold anything. Returns a new tensor
    [n, C, W - 1] of any strides, in the window's dtype.
    """
    run = implementation("causal_conv1d.conv_window", x.device.type, reference.conv_window)
    return run(x, window, path, count)


def conv_windows_all(x: torch.Tensor, window: torch.Tensor, parents: torch.Tensor | None = None) -> torch.Tensor:
    """The window after each node along its own path: [n, T, C, W - 1] in the window's dtype. Shapes as `conv_block`."""
    run = implementation("causal_conv1d.conv_windows_all", x.device.type, reference.conv_windows_all)
    return run(x, window, parents)
