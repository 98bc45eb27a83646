"""The full-width tables that `kernels.rotary.apply_rotary` takes. Made once per step, so no op of their own."""

from __future__ import annotations

import torch


def full_width(cos: torch.Tensor, sin: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables [t, dim] of `apply_rotary` from cos, sin [t, r] with 2 r <= dim."""
    rest = cos.new_ones(cos.shape[0], dim - 2 * cos.shape[1])
    return torch.cat([cos, cos, rest], 1), torch.cat([-sin, sin, rest - 1.0], 1)


def partners(r: int, dim: int) -> torch.Tensor:
    """[dim] int64: what each of the first 2 r dimensions is rotated with; the others are their own."""
    return torch.tensor([*range(r, 2 * r), *range(r), *range(2 * r, dim)], dtype=torch.int64)
