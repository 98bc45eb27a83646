"""Inputs for tests and benchmarks of the Mamba-2 ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cases import generator, random_lengths, random_parents


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of `kernels.mamba2`; rows end in padding (dt = 0) after `lengths` [n] tokens."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    state: torch.Tensor
    parents: torch.Tensor | None
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """n rows of T tokens; H heads of P by N in G groups."""

    n: int
    T: int
    H: int = 4
    P: int = 8
    G: int = 2
    N: int = 16


SHAPES: dict[str, Shape] = {
    "no rows": Shape(0, 3),
    "no tokens": Shape(2, 0),
    "one token": Shape(3, 1),
    "one of everything": Shape(1, 1, 1, 1, 1, 1),
    "odd": Shape(3, 5, 6, 7, 3, 11),
    "one group": Shape(2, 8, 6, 4, 1, 16),
    "a group a head": Shape(2, 7, 3, 16, 3, 5),
    "wide": Shape(2, 8, 12, 64, 1, 128),
    "long": Shape(2, 37),
}


def make(shape: Shape, *, tree: bool = False, padded: bool = True, seed: int = 0, device: str = "cpu") -> Case:
    """Decays from almost none to almost all within a row: the hard case for sums of their logarithms."""
    source = generator(seed)
    n, T, H, P, G, N = shape.n, shape.T, shape.H, shape.P, shape.G, shape.N

    def normal(size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=source)

    lengths = random_lengths(n, T, source) if padded else torch.full((n,), T)
    real = (torch.arange(T) < lengths[:, None])[:, :, None]
    parents = random_parents(n, T, source) if tree else None
    return Case(
        x=normal((n, T, H, P)).to(device),
        dt=(torch.exp(normal((n, T, H)) * 2 - 2) * real).to(device),
        A=-torch.exp(normal((H,))).to(device),
        B=normal((n, T, G, N)).to(device),
        C=normal((n, T, G, N)).to(device),
        D=normal((H,)).to(device),
        state=normal((n, H, P, N)).to(device),
        parents=None if parents is None else parents.to(device),
        lengths=lengths.to(device),
    )
