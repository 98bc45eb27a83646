"""Torch implementation of the norms."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.norm.rms_norm`."""
    if x.dtype == weight.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return functional.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(x.dtype)


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    norm_before_gate: bool,
    group_size: int | None,
) -> torch.Tensor:
    """See `kernels.norm.rms_norm_gated`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    opening = functional.silu(gate.to(wide.dtype))
    if not norm_before_gate:
        wide = wide * opening
    if group_size is not None:
        wide = wide.view(*wide.shape[:-1], -1, group_size)
    wide = _normalised(wide, eps)
    if group_size is not None:
        wide = wide.flatten(-2)
    wide = wide * weight
    if norm_before_gate:
        wide = wide * opening
    return wide.to(x.dtype)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], None, eps)
