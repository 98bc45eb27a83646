"""Inputs for tests and benchmarks of paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cases import generator, random_parents


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of `kernels.paged_attention.layout` and `attend`. Every cell that is in no row's context holds NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    fed: tuple[int, ...]
    max_context: int
    scale: float
    parents: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Shape:
    """Row i has `lengths[i]` tokens and feeds fed[i]; Hq query and Hkv key heads of D."""

    lengths: tuple[int, ...]
    fed: tuple[int, ...]
    Hq: int = 6
    Hkv: int = 2
    D: int = 16
    block_size: int = 4


SHAPES: dict[str, Shape] = {
    "no rows": Shape((), ()),
    "first token": Shape((0,), (1,)),
    "decode": Shape((5, 16, 3, 0), (1, 1, 1, 1)),
    "verify": Shape((5, 16, 3), (4, 4, 4)),
    "ragged verify": Shape((5, 16, 3, 8), (4, 1, 5, 2)),
    "no groups": Shape((7, 12), (3, 3), 4, 4, 8, 16),
    "one key head": Shape((7, 12), (3, 2), 4, 1, 8, 1),
    "prefill": Shape((0, 13, 0, 7), (33, 1, 18, 4)),
    "long prefill": Shape((3, 0), (300, 520), 4, 2, 8, 16),
}


def make(shape: Shape, *, tree: bool = False, seed: int = 0, device: str = "cpu") -> Case:
    """Blocks are handed out in random order, with two to spare; the bound on the context is not tight."""
    source = generator(seed)
    size = shape.block_size
    ends = [length + count for length, count in zip(shape.lengths, shape.fed, strict=True)]
    blocks = [-(-end // size) for end in ends]
    columns = max(blocks, default=0) + 1
    free = iter((1 + torch.randperm(sum(blocks) + 2, generator=source)).tolist())
    table = [[next(free) for _ in range(count)] + [0] * (columns - count) for count in blocks]
    block_table = torch.tensor(table, dtype=torch.int64).view(len(blocks), columns)
    caches = []
    for _ in range(2):
        cache = torch.full((sum(blocks) + 3, size, shape.Hkv, shape.D), float("nan"))
        for row, end in zip(table, ends, strict=True):
            for place in range(end):
                cache[row[place // size], place % size] = torch.randn(shape.Hkv, shape.D, generator=source)
        caches.append(cache.to(device))
    parents = random_parents(len(blocks), max(shape.fed, default=0), source) if tree else None
    return Case(
        q=torch.randn(sum(shape.fed), shape.Hq, shape.D, generator=source).to(device),
        k_cache=caches[0],
        v_cache=caches[1],
        block_table=block_table.to(device),
        lengths=torch.tensor(shape.lengths, dtype=torch.int64).to(device),
        fed=shape.fed,
        max_context=min(max(ends, default=0) + 2, columns * size),
        scale=shape.D**-0.5,
        parents=None if parents is None else parents.to(device),
    )
