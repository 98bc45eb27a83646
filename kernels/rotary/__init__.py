"""Rotary position embedding over the first dimensions of each head, in the half-rotation layout."""

from __future__ import annotations

import torch

from kernels.registry import implementation
from kernels.rotary import reference


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates dimensions (i, i + r) by angle i of each token, for i < r; those from 2 r on pass through.

    q [t, Hq, D], k [t, Hk, D]; cos, sin [t, r] with 2 r <= D: one column per angle, not the doubled tables of
    transformers. Returns new tensors in the dtypes of q and k.
    """
    run = implementation("rotary.apply_rotary", q.device.type, reference.apply_rotary)
    return run(q, k, cos, sin)
