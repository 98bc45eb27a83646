"""Root-mean-square normalisation, plain and gated. Weights are plain: a model with (1 + w) folds the 1 in at load."""

from __future__ import annotations

import torch

from kernels.norm import reference
from kernels.registry import implementation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides x [..., D] by its root mean square, times weight [D]. float32 inside; returns x's dtype."""
    run = implementation("norm.rms_norm", x.device.type, reference.rms_norm)
    return run(x, weight, eps)


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    norm_before_gate: bool,
    group_size: int | None = None,
) -> torch.Tensor:
    """Returns norm(x) * silu(gate) if `norm_before_gate` (gated delta nets), else norm(x * silu(gate)) (Mamba-2).

    x, gate [..., D], weight [D]; the mean square is taken over groups of `group_size` neighbours, D if None. float32
    inside; returns x's dtype.
    """
    run = implementation("norm.rms_norm_gated", x.device.type, reference.rms_norm_gated)
    return run(x, gate, weight, eps, norm_before_gate=norm_before_gate, group_size=group_size)
