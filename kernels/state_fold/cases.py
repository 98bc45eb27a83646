"""Inputs for tests and benchmarks of the fold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cases import generator, random_lengths


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of `kernels.state_fold.fold`. Paths pick increasing nodes; behind `count` they hold nonsense."""

    state: torch.Tensor
    log_decay: torch.Tensor
    u: torch.Tensor
    k: torch.Tensor
    path: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """n rows of T nodes, P of them on the path at most; H heads of V by K in G groups."""

    n: int
    T: int
    P: int
    H: int = 4
    V: int = 8
    G: int = 2
    K: int = 16


SHAPES: dict[str, Shape] = {
    "no rows": Shape(0, 3, 2),
    "no nodes": Shape(2, 0, 0),
    "no path": Shape(2, 3, 0),
    "one node": Shape(3, 1, 1),
    "odd": Shape(5, 7, 4, 6, 7, 3, 11),
    "one group": Shape(4, 8, 8, 6, 4, 1, 16),
    "wide": Shape(3, 8, 5, 12, 64, 1, 128),
}


def make(shape: Shape, *, seed: int = 0, device: str = "cpu") -> Case:
    """Standard normal updates under decays from almost none to almost all."""
    source = generator(seed)
    n, T, P = shape.n, shape.T, shape.P

    def normal(size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=source).to(device)

    count = random_lengths(n, P, source)
    path = torch.rand(n, T, generator=source).argsort(1)[:, :P].sort(1).values
    path = path.masked_fill(torch.arange(P) >= count[:, None], -7)
    return Case(
        state=normal((n, shape.H, shape.V, shape.K)),
        log_decay=-torch.exp(normal((n, T, shape.H)) * 2 - 2),
        u=normal((n, T, shape.H, shape.V)),
        k=normal((n, T, shape.G, shape.K)),
        path=path.to(device),
        count=count.to(device),
    )
