"""Torch implementation of the norms."""

from __future__ import annotations

import torch
from torch.nn import functional

FLOAT32 = 4  # bytes; what is narrower is normed in float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.norm.rms_norm`."""
    if x.dtype == weight.dtype and x.dtype.itemsize >= FLOAT32:
        return _normalised(x, eps).mul_(weight)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _normalised(wide, eps).mul_(weight).to(x.dtype)


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
    # Four small operations; torch's own norm makes more of them on a CPU.
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(size.new_full((), eps), size, size, value=1.0 / x.shape[-1]).rsqrt_()
