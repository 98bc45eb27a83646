"""What the engine asks of a model, and what a family has to provide to build one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.attention.backend import StepContext
from runtime.layers.linear import Placement
from runtime.loader import NameMap
from runtime.spec import ConfigFile, LayerSpec, ModelSpec


class HybridModel(Protocol):
    """A trunk and its head. Tensors are flat batches [T, ...]; whose tokens they are is the context's business."""

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """Shapes and ids."""

    @abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens [T] int64 -> [T, hidden] float32, as they enter the first layer."""

    @abstractmethod
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """tokens, positions [T] int64 -> hidden [T, hidden] float32, after the final norm."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden [m, hidden] float32 (after the final norm) -> [m, vocab] float32."""


class MtpHead(Protocol):
    """A checkpoint's own multi-token-prediction head, applied recurrently: depth after depth with the same weights."""

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerSpec, ...]:
        """Its layers, numbered from 0 in its own context."""

    @abstractmethod
    def forward(
        self, next_tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: StepContext
    ) -> torch.Tensor:
        """Where the trunk read token t at `positions` and made `hidden` of it, `next_tokens` holds token t + 1.

        next_tokens, positions [T] int64, hidden [T, hidden] float32 (the trunk's, or this method's own from the depth
        before). Returns [T, hidden] float32 whose logits predict token t + 2; `ctx` is the head's, not the trunk's.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden [m, hidden] -> [m, vocab] float32, by the target's head."""


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A model with unfilled parameters and the map that fills them."""

    model: HybridModel
    mtp: MtpHead | None
    names: NameMap


class Family(Protocol):
    """One file of runtime/models, named in `registry.FAMILIES`."""

    @abstractmethod
    def spec(self, config: ConfigFile, eos_ids: tuple[int, ...]) -> ModelSpec:
        """Reads config.json; an option that is not implemented is refused by name."""

    @abstractmethod
    def build(self, config: ConfigFile, spec: ModelSpec, place: Placement, *, with_mtp: bool) -> Built:
        """Allocates the parameters. `with_mtp` asks for the head if the checkpoint has one."""
