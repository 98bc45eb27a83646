"""Softmax attention over paged KV: one implementation for every row kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.paged_attention import attend, kv_write, move_cells
from runtime.state.paged import PagedStore
from runtime.step import StepPart


@dataclass(frozen=True, slots=True, eq=False)
class FullPlan:
    """cells [t] int64: where each fed token's KV goes (block * block_size + offset)."""

    part: StepPart
    cells: torch.Tensor


def cells_of(block_table: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, block_size: int) -> torch.Tensor:
    """Cells of `places` (positions in the KV sequence, int64) of table rows `rows`; all three broadcast."""
    return block_table[rows, places // block_size] * block_size + places % block_size


class FullAttention:
    """Writes new positions and reads the ones before them. KV beyond the committed length is never read by others:

    rejected positions are overwritten by the next step, so a chain's commit has nothing to do here.
    """

    def __init__(self, store: PagedStore) -> None:
        self._store = store

    def plan(self, part: StepPart) -> FullPlan:
        """Places the fed tokens. A tree's nodes are stored in node order, behind the committed length."""
        fed = torch.tensor(part.fed, device=part.lengths.device)
        rows = torch.repeat_interleave(torch.arange(len(part.fed), device=fed.device), fed, output_size=sum(part.fed))
        if part.parents is None:
            places = part.positions
        else:
            nodes = torch.arange(rows.shape[0], device=fed.device) - part.row_starts[rows]
            places = part.lengths[rows] + nodes
        return FullPlan(part, cells_of(part.block_table, rows, places, self._store.block_size))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, plan: FullPlan
    ) -> torch.Tensor:
        """Causal (or ancestor-masked) attention of q [t, heads, D] over the row's context and its new tokens."""
        keys, values, part = self._store.keys[layer], self._store.values[layer], plan.part
        kv_write(keys, values, k, v, plan.cells)
        return attend(q, keys, values, part.block_table, part.lengths, part.fed, part.max_context, scale, part.parents)

    def compact(self, plan: FullPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        """Moves the KV of nodes path[i, :kept[i]] to the front of row i's window, in every layer.

        A chain's path is the identity; then source and target are the same cells and nothing changes.
        """
        part = plan.part
        depth = torch.arange(path.shape[1], device=path.device)
        nodes = torch.where(depth < kept[:, None], path.long(), depth)
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        limit = part.lengths[:, None] + torch.tensor(part.fed, device=path.device)[:, None] - 1
        source = torch.minimum(part.lengths[:, None] + nodes, limit)
        target = torch.minimum(part.lengths[:, None] + depth, limit)
        source = torch.where(depth < kept[:, None], source, target)
        size = self._store.block_size
        moved_from = cells_of(part.block_table, rows, source, size).flatten()
        moved_to = cells_of(part.block_table, rows, target, size).flatten()
        for layer, keys in self._store.keys.items():
            move_cells(keys, self._store.values[layer], moved_from, moved_to)
