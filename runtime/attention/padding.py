"""Between a part's flat tokens [t] and rectangles [n rows, T]: recurrences run on rectangles."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Some neighbouring rows of a part as one rectangle.

    rows, tokens: their slices within the part; width: T; cells: None when every row feeds T tokens (a view is enough),
    else [t] int64, where each flat token lies in the flattened rectangle. `last` [n] int64: index of each row's last
    token. Padded places read as zero, which is neutral for every recurrence.
    """

    rows: slice
    tokens: slice
    width: int
    cells: torch.Tensor | None
    last: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows in the rectangle."""
        return self.last.shape[0]

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """[t, ...] of the part -> [n, T, ...]."""
        mine = flat[self.tokens]
        shape = (self.num_rows, self.width, *flat.shape[1:])
        if self.cells is None:
            return mine.reshape(shape)
        out = flat.new_zeros(self.num_rows * self.width, *flat.shape[1:])
        return out.index_copy_(0, self.cells, mine).view(shape)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[n, T, ...] -> the tile's flat tokens [t', ...]."""
        flat = padded.reshape(self.num_rows * self.width, *padded.shape[2:])
        return flat if self.cells is None else flat[self.cells]


def tiles(fed: Seq[int], device: torch.device) -> tuple[Tile, ...]:
    """One rectangle for all rows, or one per row when padding would more than double the work."""
    if not fed:
        return ()
    if len(fed) * max(fed) <= 2 * sum(fed) + 16:
        return (_tile(fed, 0, 0, device),)
    out, start = [], 0
    for row, count in enumerate(fed):
        out.append(_tile((count,), row, start, device))
        start += count
    return tuple(out)


def _tile(fed: Seq[int], row: int, start: int, device: torch.device) -> Tile:
    width = max(fed)
    cells = None
    if min(fed) != width:
        cells = torch.tensor([i * width + j for i, n in enumerate(fed) for j in range(n)], device=device)
    last = torch.tensor([n - 1 for n in fed], device=device)
    return Tile(slice(row, row + len(fed)), slice(start, start + sum(fed)), width, cells, last)
