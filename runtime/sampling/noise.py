"""Stand-in for `kernels.gumbel`: noise that is a pure function of seed, position and token id."""

from __future__ import annotations

import torch

_MIX = (0x1F85EBCA77C2B2AE, 0x27D4EB2F165667C5, 0x165667B19E3779F9)


def counter_gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise [m, vocab] float32 for seeds [m] and positions [m] int64."""
    row = _mix(_mix(seeds) + positions).unsqueeze(1)
    bits = _mix(row + torch.arange(vocab, device=device).unsqueeze(0) * _MIX[2])
    uniform = ((bits & 0xFFFFFF).to(torch.float32) + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 31)) * _MIX[0]
    x = (x ^ (x >> 29)) * _MIX[1]
    return x ^ (x >> 32)
