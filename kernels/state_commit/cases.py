"""Inputs for tests and benchmarks of the snapshot commit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cases import generator


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of `kernels.state_commit.gather_commit`."""

    pool: torch.Tensor
    candidates: torch.Tensor
    slots: torch.Tensor
    candidate_rows: torch.Tensor
    nodes: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """n of `rows` candidate rows of T nodes go into n of S slots; states have the shape `inner`."""

    n: int
    rows: int
    T: int
    S: int
    inner: tuple[int, ...]


SHAPES: dict[str, Shape] = {
    "no rows": Shape(0, 2, 3, 5, (4, 2)),
    "one row": Shape(1, 1, 1, 2, (3,)),
    "conv": Shape(3, 5, 4, 9, (12, 3)),
    "recurrent": Shape(4, 4, 8, 5, (4, 8, 16)),
}


def make(shape: Shape, *, seed: int = 0, device: str = "cpu") -> Case:
    """Random states; distinct random slots, never slot 0."""
    source = generator(seed)
    return Case(
        pool=torch.randn(shape.S, *shape.inner, generator=source).to(device),
        candidates=torch.randn(shape.rows, shape.T, *shape.inner, generator=source).to(device),
        slots=(1 + torch.randperm(shape.S - 1, generator=source)[: shape.n]).to(device),
        candidate_rows=torch.randperm(shape.rows, generator=source)[: shape.n].to(device),
        nodes=torch.randint(0, shape.T, (shape.n,), generator=source).to(device),
    )
