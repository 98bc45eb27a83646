"""Torch implementation of paged attention: a padded gather for short rows, a loop over rows and tiles for long ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch.nn import functional

from kernels.tree import ancestors

SHORT = 16  # rows that feed more tokens than this are prefill
TILE = 256  # queries at a time in prefill: a tile does not compute what lies behind the causal mask
GATHER = 1 << 19  # elements gathered at a time: what stays in cache


def kv_write(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cells: torch.Tensor
) -> None:
    """See `kernels.paged_attention.kv_write`."""
    for cache, new in ((k_cache, k), (v_cache, v)):
        _flat(cache).index_copy_(0, cells, new.to(cache.dtype).flatten(1))


def move_cells(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `kernels.paged_attention.move_cells`."""
    for cache in (k_cache, v_cache):
        flat = _flat(cache)
        flat.index_copy_(0, target, flat.index_select(0, source))


@dataclass(slots=True, eq=False)
class Layout:
    """Of n rows. Short rows are computed as one rectangle [n, width] over [n, context] cells; long ones one by one.

    cells [n * context] int64, visible [n, width, context] bool or None (everything is seen), context, `filled` and
    `taken` (flat token of every place in the rectangle, and back; None when all rows are `width` wide); `masks`: by
    query heads per key head. `tails`: of a long row, its cells [1, length + fed], its length and what it feeds.
    """

    n: int
    width: int
    context: int = 0
    cells: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    filled: torch.Tensor | None = None
    taken: torch.Tensor | None = None
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    tails: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)

    def mask(self, R: int) -> torch.Tensor | None:
        """Visibility as [n, 1, R * width, context]."""
        if self.visible is None:
            return None
        if self.width == 1:
            return self.visible.unsqueeze(1)
        found = self.masks.get(R)
        if found is None:
            shape = (self.n, R, self.width, self.context)
            found = self.visible.unsqueeze(1).expand(shape).reshape(self.n, 1, R * self.width, self.context)
            self.masks[R] = found
        return found


def layout(
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    fed: tuple[int, ...],
    max_context: int,
    block_size: int,
    parents: torch.Tensor | None,
) -> Layout:
    """See `kernels.paged_attention.layout`."""
    n, width, device = len(fed), max(fed, default=0), block_table.device
    if sum(fed) == 0:
        return Layout(n, width)
    if parents is None and width > SHORT:
        return Layout(n, width, tails=_tails(block_table, lengths, fed, block_size))
    context = min(max_context, block_table.shape[1] * block_size)
    made = Layout(n, width, context=context)
    uniform = sum(fed) == n * width
    if not uniform:
        starts = list(accumulate(fed, initial=0))
        last = starts[-1] - 1
        filled = [min(start + j, last) for start in starts[:-1] for j in range(width)]
        taken = [i * width + j for i, count in enumerate(fed) for j in range(count)]
        made.filled, made.taken = torch.tensor(filled, device=device), torch.tensor(taken, device=device)
    cells, ahead = _context(block_table, lengths, context, block_size)
    exact = n == 1 and device.type == "cpu" and int(lengths[0]) + width == context
    if not exact:
        # A position behind the row's end reads the row's first cell, which is finite, and is masked in the scores.
        # Masking alone is not enough: a probability of 0 times a NaN value is NaN.
        end = width if uniform else torch.tensor(fed, device=device).unsqueeze(1)
        cells = torch.where(ahead < end, cells, cells[:, :1])
    made.cells = cells.reshape(-1)
    if parents is not None:
        node = ahead.clamp(0, width - 1).unsqueeze(1).expand(n, width, context)
        seen = ancestors(parents).gather(2, node).bool() & (ahead < width).unsqueeze(1)
        made.visible = seen | (ahead < 0).unsqueeze(1)
    elif not exact or width > 1:
        made.visible = ahead.unsqueeze(1) <= torch.arange(width, device=device).unsqueeze(1)
    return made


def successive(
    block_table: torch.Tensor, lengths: torch.Tensor, count: int, max_context: int, block_size: int
) -> list[Layout]:
    """See `kernels.paged_attention.successive`."""
    n = lengths.shape[0]
    context = min(max_context, block_table.shape[1] * block_size)
    cells, ahead = _context(block_table, lengths, context, block_size)
    if n == 1 and lengths.device.type == "cpu" and int(lengths[0]) + count == context:
        ends = range(context - count + 1, context + 1)
        return [Layout(1, 1, context=end, cells=cells[0, :end]) for end in ends]
    made = []
    for step in range(count):
        seen = ahead <= step
        chosen = torch.where(seen, cells, cells[:, :1]).reshape(-1)
        made.append(Layout(n, 1, context=context, cells=chosen, visible=seen.unsqueeze(1)))
    return made


def _context(
    block_table: torch.Tensor, lengths: torch.Tensor, context: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every row's first `context` positions [n, context]: the cells, and how far behind `lengths` they lie."""
    first = block_table[:, : -(-context // block_size), None] * block_size
    cells = (first + torch.arange(block_size, device=lengths.device)).flatten(1)[:, :context]
    return cells, torch.arange(context, device=lengths.device) - lengths.unsqueeze(1)


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """See `kernels.paged_attention.attend`."""
    if q.shape[0] == 0:
        return torch.empty_like(q)
    if layout.tails:
        return _attend_rows(q, k_cache, v_cache, layout, scale)
    if layout.filled is None or layout.taken is None:
        return _attend_rectangle(q, k_cache, v_cache, layout, scale)
    return _attend_rectangle(q[layout.filled], k_cache, v_cache, layout, scale)[layout.taken]


def _attend_rectangle(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """Every row over its whole context, for q [n T, Hq, D]: [n T, Hq, D]. Only shapes decide what is computed."""
    n, T, context = layout.n, layout.width, layout.context
    _, Hq, D = q.shape
    Hkv = k_cache.shape[2]
    R = Hq // Hkv
    assert layout.cells is not None
    if T == 1:
        grouped = q.reshape(n, Hkv, R, D)
    else:
        grouped = q.reshape(n, T, Hkv, R, D).permute(0, 2, 3, 1, 4).reshape(n, Hkv, R * T, D)
    mask = layout.mask(R)
    rows = max(1, GATHER // (context * Hkv * D))
    if rows >= n:
        k, v = _gather(k_cache, layout.cells, n, q.dtype), _gather(v_cache, layout.cells, n, q.dtype)
        out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    else:
        parts = []
        for i in range(0, n, rows):
            count = min(rows, n - i)
            cells = layout.cells[i * context : (i + count) * context]
            k, v = _gather(k_cache, cells, count, q.dtype), _gather(v_cache, cells, count, q.dtype)
            part = None if mask is None else mask[i : i + count]
            parts.append(
                functional.scaled_dot_product_attention(grouped[i : i + count], k, v, attn_mask=part, scale=scale)
            )
        out = torch.cat(parts)
    if T == 1:
        return out.reshape(n, Hq, -1)
    return out.reshape(n, Hkv, R, T, -1).permute(0, 3, 1, 2, 4).reshape(n * T, Hq, -1)


def _tails(
    block_table: torch.Tensor, lengths: torch.Tensor, fed: tuple[int, ...], block_size: int
) -> list[tuple[torch.Tensor, int, int]]:
    """Exact cells of every row (lengths are read by the host)."""
    tails = []
    for i, (length, count) in enumerate(zip(lengths.tolist(), fed, strict=True)):
        position = torch.arange(length + count, device=block_table.device)
        cells = block_table[i, position // block_size] * block_size + position % block_size
        tails.append((cells, length, count))
    return tails


def _attend_rows(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, scale: float
) -> torch.Tensor:
    """Prefill: every row by itself over exactly its context."""
    D = q.shape[2]
    Hkv = k_cache.shape[2]
    R = q.shape[1] // Hkv
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    offset = 0
    for cells, length, count in layout.tails:
        position = torch.arange(length + count, device=q.device)
        k, v = _gather(k_cache, cells, 1, q.dtype), _gather(v_cache, cells, 1, q.dtype)
        for first in range(0, count, TILE):
            T = min(TILE, count - first)
            seen = length + first + T
            tile = slice(offset + first, offset + first + T)
            grouped = q[tile].reshape(T, Hkv, R, D).permute(1, 2, 0, 3).reshape(1, Hkv, R * T, D)
            mask = position[:seen] <= position[length + first : seen].unsqueeze(1).repeat(R, 1)
            part = functional.scaled_dot_product_attention(
                grouped, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale
            )
            out[tile] = part.reshape(Hkv, R, T, -1).permute(2, 0, 1, 3).reshape(T, Hkv * R, -1)
        offset += count
    return out


def _flat(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(-1, cache.shape[2] * cache.shape[3])


def _gather(cache: torch.Tensor, cells: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values at cells [n * L], as [n, Hkv, L, D]."""
    rows = _flat(cache).index_select(0, cells)
    if rows.dtype != dtype:
        rows = rows.to(dtype)
    return rows.view(n, -1, *cache.shape[2:]).transpose(1, 2)
