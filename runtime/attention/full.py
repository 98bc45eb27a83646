"""Softmax attention over paged KV: one implementation for every row kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.paged_attention import Layout, attend, kv_write, layout, move_cells
from runtime.state.paged import PagedStore
from runtime.step import StepPart


@dataclass(frozen=True, slots=True, eq=False)
class FullPlan:
    """cells [t] int64: where each fed token's KV goes (block * block_size + offset); `layout`: what they attend to."""

    part: StepPart
    cells: torch.Tensor
    layout: Layout


def cells_of(
    block_table: torch.Tensor, rows: torch.Tensor | None, places: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Cells of `places` (positions in the KV sequence, int64) of table rows `rows` (None: the table's only row)."""
    blocks = places // block_size
    found = block_table[0].index_select(0, blocks) if rows is None else block_table[rows, blocks]
    return torch.add(places - blocks * block_size, found, alpha=block_size)


class FullAttention:
    """Writes new positions and reads the ones before them. KV beyond the committed length is never read by others:

    rejected positions are overwritten by the next step, so a chain's commit has nothing to do here.
    """

    def __init__(self, store: PagedStore) -> None:
        self._store = store

    def plan(self, part: StepPart) -> FullPlan:
        """Places the fed tokens. A tree's nodes are stored in node order, behind the committed length."""
        size = self._store.block_size
        seen = layout(part.block_table, part.lengths, part.fed, part.max_context, size, part.parents)
        if len(part.fed) == 1 and part.parents is None:
            return FullPlan(part, cells_of(part.block_table, None, part.positions, size), seen)
        count = part.positions.shape[0]
        fed = part.row_starts[1:] - part.row_starts[:-1]
        rows = torch.repeat_interleave(torch.arange(len(part.fed), device=fed.device), fed, output_size=count)
        places = part.positions
        if part.parents is not None:
            places = part.lengths[rows] + torch.arange(count, device=fed.device) - part.row_starts[rows]
        return FullPlan(part, cells_of(part.block_table, rows, places, size), seen)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, plan: FullPlan
    ) -> torch.Tensor:
        """Causal (or ancestor-masked) attention of q [t, heads, D] over the row's context and its new tokens."""
        keys, values = self._store.keys[layer], self._store.values[layer]
        kv_write(keys, values, k, v, plan.cells)
        return attend(q, keys, values, plan.layout, scale)

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
