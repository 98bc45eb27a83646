"""The token embedding and the output head, which may be the same matrix."""

from __future__ import annotations

import torch
from torch.nn import functional

from runtime.layers.linear import Placement
from runtime.loader import Weight


class Embedding:
    """A table [vocab, hidden]: looks tokens up, and (as a head) scores every token."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, place: Placement) -> None:
        self.weight = place.matrix(vocab_size, hidden_size)
        self._name = name
        self._cast = None if place.dtype == torch.float32 else place.dtype

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens [T] -> [T, hidden] float32."""
        found = self.weight.index_select(0, tokens)
        return found if self._cast is None else found.float()

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden [m, hidden] float32 -> logits [m, vocab] float32."""
        if self._cast is None:
            return functional.linear(hidden, self.weight)
        return functional.linear(hidden.to(self._cast), self.weight).float()

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensor goes."""
        return [Weight(f"{self._name}.weight", self.weight, tuple(self.weight.shape))]
