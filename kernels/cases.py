"""What the ops' input generators share. Everything is drawn on the CPU, so a case is the same on every device."""

from __future__ import annotations

import torch


def generator(seed: int) -> torch.Generator:
    """A source of randomness of a case's own."""
    return torch.Generator().manual_seed(seed)


def random_parents(n: int, T: int, source: torch.Generator) -> torch.Tensor:
    """Random trees [n, T] int64: every node's parent is an earlier node or -1, more often a late one."""
    node = torch.arange(T)
    back = torch.minimum(torch.rand(n, T, generator=source), torch.rand(n, T, generator=source))
    return (node - 1 - (back * (node + 1)).long()).clamp_(min=-1)


def random_lengths(n: int, longest: int, source: torch.Generator) -> torch.Tensor:
    """Row lengths [n] int64 in 0 .. longest, the first row at its full length."""
    lengths = torch.randint(0, longest + 1, (n,), generator=source)
    lengths[:1] = longest
    return lengths
