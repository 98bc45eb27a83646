"""Recurrent state: one row per slot and layer. Slot 0 is padding and is never handed out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """One recurrent layer's state: a window of `conv_width - 1` raw inputs and a matrix per head.

    `groups` is the number of key heads (`heads % groups == 0`).
    """

    conv_channels: int
    conv_width: int
    heads: int
    v_dim: int
    k_dim: int
    groups: int


class RecurrentStore:
    """Committed states, float32: conv [slots, channels, width - 1] and state [slots, heads, V, K] for each layer.

    float32 also under 16-bit weights: with a 16-bit pool verification, which rounds only when it stores, and
    step-by-step decoding would differ, and speculation would no longer be exact.
    """

    def __init__(self, layers: Mapping[int, RecurrentShape], num_slots: int, *, device: torch.device) -> None:
        self.num_slots = num_slots
        self.shapes = dict(layers)
        self.conv: dict[int, torch.Tensor] = {}
        self.state: dict[int, torch.Tensor] = {}
        for layer, s in layers.items():
            self.conv[layer] = torch.zeros(num_slots, s.conv_channels, s.conv_width - 1, device=device)
            self.state[layer] = torch.zeros(num_slots, s.heads, s.v_dim, s.k_dim, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.conv.values(), *self.state.values()))

    def load(self, layer: int, slots: torch.Tensor, fresh: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of conv and state of `slots` [n]; zero where `fresh` [n] bool, whatever the slot holds."""
        conv, state = self.conv[layer][slots], self.state[layer][slots]
        if fresh is not None:
            conv.masked_fill_(fresh[:, None, None], 0.0)
            state.masked_fill_(fresh[:, None, None, None], 0.0)
        return conv, state

    def store(self, layer: int, slots: torch.Tensor, conv: torch.Tensor, state: torch.Tensor) -> None:
        """Writes conv and state of `slots` [n]."""
        self.conv[layer].index_copy_(0, slots, conv)
        self.state[layer].index_copy_(0, slots, state)

    def fill(self, slots: list[int], value: float) -> None:
        """Overwrites whole slots (tests poison freed ones, so that a stale read shows)."""
        index = torch.tensor(slots, dtype=torch.long)
        for tensor in (*self.conv.values(), *self.state.values()):
            tensor[index.to(tensor.device)] = value
