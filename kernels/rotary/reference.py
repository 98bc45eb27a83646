"""Torch implementation of the rotary embedding."""

from __future__ import annotations

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """See `kernels.rotary.apply_rotary`."""
    turned = (x * cos.unsqueeze(1)).addcmul_(x.index_select(2, partner), sin.unsqueeze(1))
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)
