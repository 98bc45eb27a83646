"""Inputs for tests and benchmarks of the noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of `kernels.gumbel.counter_gumbel`."""

    seeds: torch.Tensor
    positions: torch.Tensor
    vocab: int


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "no rows": ((), (), 10),
    "no tokens": ((1,), (2,), 0),
    "one": ((0,), (0,), 1),
    "neighbours": ((0, 0, 1, 1, 2), (0, 1, 0, 1, 2), 1000),
    "extremes": ((2**63 - 1, -(2**63), -1, 0), (0, 2**31, 2**62, 0), 257),
}


def make(name: str, *, device: str = "cpu") -> Case:
    """The named case."""
    seeds, positions, vocab = CASES[name]
    return Case(
        torch.tensor(seeds, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        vocab,
    )
