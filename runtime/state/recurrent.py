"""Recurrent state: one row per slot and layer. Slot 0 is padding and is never handed out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

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


class SlotStore(Protocol):
    """State of one kind by slot, and checkpoints of it by row: what goes with a sequence when it is set aside.

    Slots and rows are given in pairs, all in one call; no row or slot occurs twice in it.
    """

    @abstractmethod
    def save(self, slots: Seq[int], rows: Seq[int]) -> None:
        """Copies the state of each slot to its checkpoint row."""

    @abstractmethod
    def restore(self, rows: Seq[int], slots: Seq[int]) -> None:
        """Copies each checkpoint row to its slot."""

    @abstractmethod
    def take_out(self, row: int) -> list[torch.Tensor]:
        """Copies of a checkpoint row in host memory."""

    @abstractmethod
    def put_in(self, slot: int, saved: list[torch.Tensor]) -> None:
        """Makes what `take_out` gave the state of a slot."""

    @abstractmethod
    def spoil(self, rows: Seq[int], value: float) -> None:
        """Overwrites checkpoint rows (tests poison free ones, so that a stale read shows)."""


class RecurrentStore(SlotStore):
    """Committed states, float32: conv [slots, channels, width - 1] and state [slots, heads, V, K] for each layer.

    float32 also under 16-bit weights: with a 16-bit pool verification, which rounds only when it stores, and
    step-by-step decoding would differ, and speculation would no longer be exact.

    Checkpoints lie beside them, in `saved_conv` and `saved_state` by row: they need none of what else a slot has.
    """

    def __init__(
        self,
        layers: Mapping[int, RecurrentShape],
        num_slots: int,
        *,
        device: torch.device,
        num_checkpoints: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.num_checkpoints = num_checkpoints
        self.shapes = dict(layers)
        self.conv: dict[int, torch.Tensor] = {}
        self.state: dict[int, torch.Tensor] = {}
        self.saved_conv: dict[int, torch.Tensor] = {}
        self.saved_state: dict[int, torch.Tensor] = {}
        for layer, s in layers.items():
            self.conv[layer] = torch.zeros(num_slots, s.conv_channels, s.conv_width - 1, device=device)
            self.state[layer] = torch.zeros(num_slots, s.heads, s.v_dim, s.k_dim, device=device)
            self.saved_conv[layer] = torch.zeros(num_checkpoints, *self.conv[layer].shape[1:], device=device)
            self.saved_state[layer] = torch.zeros(num_checkpoints, *self.state[layer].shape[1:], device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of the slots, in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.conv.values(), *self.state.values()))

    @property
    def num_checkpoint_bytes(self) -> int:
        """Memory of the checkpoints, in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.saved_conv.values(), *self.saved_state.values()))

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

    def clear(self) -> None:
        """All slots and checkpoints become 0."""
        for tensors in (self.conv, self.state, self.saved_conv, self.saved_state):
            for tensor in tensors.values():
                tensor.zero_()

    def fill(self, slots: list[int], value: float) -> None:
        """Overwrites whole slots (tests poison freed ones, so that a stale read shows)."""
        index = torch.tensor(slots, dtype=torch.long)
        for tensor in (*self.conv.values(), *self.state.values()):
            tensor[index.to(tensor.device)] = value

    def save(self, slots: Seq[int], rows: Seq[int]) -> None:
        """See SlotStore.save. What is pending for the slots must have been folded."""
        for live, saved in self._pairs():
            saved[list(rows)] = live[list(slots)]

    def restore(self, rows: Seq[int], slots: Seq[int]) -> None:
        """See SlotStore.restore."""
        for live, saved in self._pairs():
            live[list(slots)] = saved[list(rows)]

    def take_out(self, row: int) -> list[torch.Tensor]:
        """See SlotStore.take_out."""
        return [saved[row].to("cpu", copy=True) for _, saved in self._pairs()]

    def put_in(self, slot: int, saved: list[torch.Tensor]) -> None:
        """See SlotStore.put_in."""
        for (live, _), tensor in zip(self._pairs(), saved, strict=True):
            live[slot] = tensor.to(live.device)

    def spoil(self, rows: Seq[int], value: float) -> None:
        """See SlotStore.spoil."""
        for _, saved in self._pairs():
            saved[list(rows)] = value

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(by slot, by checkpoint row), in a fixed order."""
        found = []
        for layer, conv in self.conv.items():
            found.append((conv, self.saved_conv[layer]))
            found.append((self.state[layer], self.saved_state[layer]))
        return found
