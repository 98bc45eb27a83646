"""Inputs for tests and benchmarks of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cases import generator, random_lengths, random_parents


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of `kernels.gated_delta`; rows end in padding (g = beta = 0) after `lengths` [n] tokens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    parents: torch.Tensor | None
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """n rows of T tokens; Hv value heads of V, Hk key heads of K."""

    n: int
    T: int
    Hv: int = 4
    V: int = 8
    Hk: int = 2
    K: int = 16


SHAPES: dict[str, Shape] = {
    "no rows": Shape(0, 3),
    "no tokens": Shape(2, 0),
    "one token": Shape(3, 1),
    "one of everything": Shape(1, 1, 1, 1, 1, 1),
    "odd": Shape(3, 5, 6, 7, 3, 11),
    "one key head": Shape(2, 8, 6, 4, 1, 16),
    "as many keys as values": Shape(2, 7, 3, 16, 3, 5),
    "wide": Shape(2, 8, 8, 128, 4, 128),
    "long": Shape(2, 37),
}


def make(shape: Shape, *, tree: bool = False, padded: bool = True, seed: int = 0, device: str = "cpu") -> Case:
    """Decays from almost none to almost all within a row; keys of a row resemble each other, as trained ones do."""
    source = generator(seed)
    n, T, Hv, V, Hk, K = shape.n, shape.T, shape.Hv, shape.V, shape.Hk, shape.K

    def normal(size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=source)

    lengths = random_lengths(n, T, source) if padded else torch.full((n,), T)
    real = (torch.arange(T) < lengths[:, None])[:, :, None]
    parents = random_parents(n, T, source) if tree else None
    return Case(
        q=normal((n, T, Hk, K)).to(device),
        k=(normal((n, T, Hk, K)) + normal((n, 1, Hk, K))).to(device),
        v=normal((n, T, Hv, V)).to(device),
        g=(-torch.exp(normal((n, T, Hv)) * 2 - 2) * real).to(device),
        beta=(torch.sigmoid(normal((n, T, Hv)) * 2) * real).to(device),
        state=normal((n, Hv, V, K)).to(device),
        parents=None if parents is None else parents.to(device),
        lengths=lengths.to(device),
    )
