"""Rotary position embedding: the angles of a step's positions, computed once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """cos, sin [T, rotary_dim / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary:
    """Angles position * theta^(-2i / rotary_dim). Only the first `rotary_dim` values of each head turn."""

    def __init__(self, rotary_dim: int, theta: float, device: torch.device) -> None:
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        self._frequencies = 1.0 / (theta**exponent)

    def __call__(self, positions: torch.Tensor) -> Angles:
        """The angles of positions [T] int64."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        return Angles(angles.cos(), angles.sin())
