"""Torch implementation of the rotary embedding."""

from __future__ import annotations

import torch


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.rotary.apply_rotary`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    r = cos.shape[2]
    first, second = x[..., :r], x[..., r : 2 * r]
    rotated = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    return torch.cat([*rotated, x[..., 2 * r :]], 2)
