"""Inputs for tests and benchmarks of the norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cases import generator


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of `kernels.norm`."""

    x: torch.Tensor
    gate: torch.Tensor
    weight: torch.Tensor
    eps: float
    group_size: int | None


@dataclass(frozen=True, slots=True)
class Shape:
    """Inputs [*lead, D], normalised over `group_size` or D."""

    lead: tuple[int, ...]
    D: int
    group_size: int | None = None


SHAPES: dict[str, Shape] = {
    "no tokens": Shape((0,), 8),
    "one": Shape((1,), 1),
    "flat": Shape((5,), 33),
    "heads": Shape((5, 4), 16),
    "groups": Shape((5,), 24, 8),
    "wide": Shape((2, 3), 768),
}


def make(shape: Shape, *, seed: int = 0, device: str = "cpu") -> Case:
    """Rows of very different size, one of them all zero."""
    source = generator(seed)
    size = (*shape.lead, shape.D)
    x = torch.randn(size, generator=source) * torch.exp(3 * torch.randn((*shape.lead, 1), generator=source))
    x[-1:] = 0.0
    return Case(
        x=x.to(device),
        gate=torch.randn(size, generator=source).to(device),
        weight=torch.randn(shape.D, generator=source).to(device),
        eps=1e-6,
        group_size=shape.group_size,
    )
