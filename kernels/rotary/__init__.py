"""Rotary position embedding over the first dimensions of each head, in the half-rotation layout."""

from __future__ import annotations

import torch

from kernels.registry import implementation
from kernels.rotary import reference


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """Rotates dimensions (i, i + r) by angle i of each token, for i < r; those from 2 r on pass through.

    x [t, H, D]; cos, sin [t, D] float32 and partner [D] int64 are full-width tables: dimension d becomes
    x[d] cos[d] + x[partner[d]] sin[d], so sin is negative in the first half, and cos 1, sin 0 behind 2 r
    (`kernels.rotary.tables` makes them). Queries and keys that lie side by side are rotated in one call. Returns a new
    tensor in x's dtype.
    """
    run = implementation("rotary.apply_rotary", x.device.type, reference.apply_rotary)
    return run(x, cos, sin, partner)
