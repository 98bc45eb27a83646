"""Inputs for tests and benchmarks of the causal convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cases import generator, random_lengths, random_parents


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of `kernels.causal_conv1d`; path [n, T] and count [n] are those of a chain's first tokens."""

    x: torch.Tensor
    window: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    parents: torch.Tensor | None
    path: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """n rows of T tokens with C channels, under a filter of width W."""

    n: int
    T: int
    C: int = 12
    W: int = 4
    bias: bool = True


SHAPES: dict[str, Shape] = {
    "no rows": Shape(0, 3),
    "no tokens": Shape(2, 0),
    "one token": Shape(3, 1),
    "shorter than the window": Shape(3, 2, bias=False),
    "one channel": Shape(2, 5, 1),
    "width 1": Shape(2, 3, W=1),
    "width 2": Shape(2, 5, W=2),
    "wide": Shape(2, 8, 1800),
    "long": Shape(2, 37, bias=False),
}


def make(shape: Shape, *, tree: bool = False, seed: int = 0, device: str = "cpu") -> Case:
    """Standard normal everything."""
    source = generator(seed)
    n, T, C, W = shape.n, shape.T, shape.C, shape.W

    def normal(size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=source).to(device)

    parents = random_parents(n, T, source) if tree else None
    return Case(
        x=normal((n, T, C)),
        window=normal((n, C, W - 1)),
        weight=normal((C, W)),
        bias=normal((C,)) if shape.bias else None,
        parents=None if parents is None else parents.to(device),
        path=torch.arange(T, device=device).repeat(n, 1),
        count=random_lengths(n, T, source).to(device),
    )
