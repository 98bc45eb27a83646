"""The gated feed-forward block (SwiGLU)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch.nn import functional

from runtime.layers.linear import Linear, Part, Placement
from runtime.loader import Weight


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(self, gate_up: Seq[Part], down: str, hidden_size: int, place: Placement) -> None:
        rows = sum(part.rows for part in gate_up)
        self._size = rows // 2
        self._gate_up = Linear(gate_up, hidden_size, place)
        self._down = Linear([Part(down, hidden_size)], self._size, place)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Returns residual + scale * mlp(x), all [T, hidden] float32."""
        both = self._gate_up(x)
        return self._down.add_to(residual, functional.silu(both[:, : self._size]) * both[:, self._size :], scale)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        return self._gate_up.weights() + self._down.weights()
