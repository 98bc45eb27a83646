"""Rotary position embedding over the first dimensions of each head, in the half-rotation layout."""

from __future__ import annotations

import torch

from kernels.registry import implementation
from kernels.rotary import reference


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """Rotates dimensions (i, i + r) by angle i of each token, for i < r; those from 2 r on pass through.

    x [t, H, D]; cos, sin [t, D] float32 and partner [D] int64 are full-width tables: dimension d becomes
    x[d] cos[d] + x[partner[d]] sin[d], so sin is negative in the first half, and cos 1, sin 0 behind 2 r
    (`full_width` makes them). Queries and keys that lie side by side are rotated in one call. Returns a new tensor in
    x's dtype.
    """
    run = implementation("rotary.apply_rotary", x.device.type, reference.apply_rotary)
    return run(x, cos, sin, partner)


def full_width(cos: torch.Tensor, sin: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables [t, dim] of `apply_rotary` from cos, sin [t, r] with 2 r <= dim."""
    rest = cos.new_ones(cos.shape[0], dim - 2 * cos.shape[1])
    return torch.cat([cos, cos, rest], 1), torch.cat([-sin, sin, rest - 1.0], 1)


def partners(r: int, dim: int) -> torch.Tensor:
    """[dim] int64: what each of the first 2 r dimensions is rotated with; the others are their own."""
    return torch.tensor([*range(r, 2 * r), *range(r), *range(2 * r, dim)], dtype=torch.int64)
