"""Where the logits of one step belong: which request, which absolute position, which drafts come before."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """One entry per row of logits [M, vocab].

    slots [M] int64 (state slot); positions [M] int64: absolute position of the token to be sampled; drafts [M, k]
    int64: the drafted tokens fed earlier in the same block, -1 where there are fewer (k is 0 when nobody counts).
    On the host: the largest `top_k` among the rows, and whether all rows that draw filter by it.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    drafts: torch.Tensor
    max_top_k: int
    all_top_k: bool

    def take(self, index: torch.Tensor) -> Positions:
        """The entries `index` [m]."""
        return replace(self, slots=self.slots[index], positions=self.positions[index], drafts=self.drafts[index])


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """How the M rows of logits fall into the R rows of a batch; host integers only.

    starts [R + 1]: prefix sums. `num` [R]: rows of logits of each batch row (0 for a prefill chunk that emits nothing),
    `width` the largest of them.
    """

    starts: Seq[int]
    num: Seq[int]
    width: int

    @classmethod
    def of(cls, starts: Seq[int]) -> Blocks:
        """From the batch's prefix sums."""
        num = [after - before for before, after in pairwise(starts)]
        return cls(starts=starts, num=num, width=max(num, default=0))

    @property
    def total(self) -> int:
        """M."""
        return self.starts[-1]

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same number."""
        return self.width * len(self.num) == self.total

    def rows(self) -> list[int]:
        """The batch row of each row of logits [M]."""
        return [row for row, num in enumerate(self.num) for _ in range(num)]

    def padded(self) -> list[int]:
        """Flat [R * width] indices into the rows of logits; beyond a row's own, its last (or any, if it has none)."""
        last = self.total - 1
        return [
            min(start + max(min(depth, num - 1), 0), last)
            for start, num in zip(self.starts, self.num, strict=False)
            for depth in range(self.width)
        ]

    def earlier(self) -> list[int]:
        """Flat [M * (width - 1)] rows of logits whose fed token is an earlier draft of the same block; -1 for none."""
        return [
            start + depth if depth <= own else -1
            for start, num in zip(self.starts, self.num, strict=False)
            for own in range(num)
            for depth in range(1, self.width)
        ]
