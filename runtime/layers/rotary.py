"""Rotary position embedding: the angles of a step's positions, computed once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.rotary.tables import full_width, partners

TABLE_LIMIT = 2**22
DRAFT_ROOM = 64


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """Full-width tables of `kernels.rotary.apply_rotary`: cos, sin [T, head_dim] float32, partner [head_dim] int64."""

    cos: torch.Tensor
    sin: torch.Tensor
    partner: torch.Tensor


class Rotary:
    """Angles position * theta^(-2i / rotary_dim). Only the first `rotary_dim` of `head_dim` values of a head turn.

    The tables of all `num_positions` (and of drafts beyond the last) are kept if they are small: one look-up a step.
    """

    def __init__(
        self, rotary_dim: int, head_dim: int, theta: float, *, num_positions: int, device: torch.device
    ) -> None:
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        self._frequencies = 1.0 / (theta**exponent)
        self._head_dim = head_dim
        self._partner = partners(rotary_dim // 2, head_dim).to(device)
        self._table: torch.Tensor | None = None
        num_positions += DRAFT_ROOM
        if 2 * num_positions * head_dim <= TABLE_LIMIT:
            self._table = torch.cat(self._compute(torch.arange(num_positions, device=device)), dim=1)

    def __call__(self, positions: torch.Tensor) -> Angles:
        """The angles of positions [T] int64."""
        if self._table is None:
            cos, sin = self._compute(positions)
        else:
            both = self._table.index_select(0, positions)
            cos, sin = both[:, : self._head_dim], both[:, self._head_dim :]
        return Angles(cos, sin, self._partner)

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        return full_width(angles.cos(), angles.sin(), self._head_dim)
