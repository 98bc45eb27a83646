"""Torch implementation of paged attention: a padded gather for short rows, a loop over rows and tiles for long ones."""

from __future__ import annotations

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


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    fed: tuple[int, ...],
    max_context: int,
    scale: float,
    parents: torch.Tensor | None,
) -> torch.Tensor:
    """See `kernels.paged_attention.attend`."""
    n = len(fed)
    t, Hq, D = q.shape
    if t == 0:
        return torch.empty_like(q)
    width = max(fed)
    if parents is None and width > SHORT:
        return _attend_rows(q, k_cache, v_cache, block_table, lengths, fed, scale)
    if t == n * width:
        padded = q.reshape(n, width, Hq, D)
        end = lengths + width
        return _attend_padded(padded, k_cache, v_cache, block_table, lengths, end, max_context, scale, parents)
    starts = accumulate(fed, initial=0)
    taken = [i * width + j for i, count in enumerate(fed) for j in range(count)]
    filled = [min(start + j, t - 1) for start, count in zip(starts, fed, strict=False) for j in range(width)]
    end = lengths + torch.tensor(fed, device=q.device)
    padded = q[torch.tensor(filled, device=q.device)].view(n, width, Hq, D)
    out = _attend_padded(padded, k_cache, v_cache, block_table, lengths, end, max_context, scale, parents)
    return out[torch.tensor(taken, device=q.device)]


def _attend_padded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    end: torch.Tensor,
    max_context: int,
    scale: float,
    parents: torch.Tensor | None,
) -> torch.Tensor:
    """Every row over its whole context, for q [n, T, Hq, D]: [n T, Hq, D]. Only shapes decide what is computed."""
    n, T, Hq, D = q.shape
    block_size, Hkv = k_cache.shape[1:3]
    R = Hq // Hkv
    context = min(max_context, block_table.shape[1] * block_size)
    position = torch.arange(context, device=q.device)
    first = block_table[:, : -(-context // block_size), None] * block_size
    cells = (first + torch.arange(block_size, device=q.device)).flatten(1)[:, :context]
    # A position behind the row's end reads the row's first cell, which is finite, and is masked in the scores. Masking
    # alone is not enough: a probability of 0 times a NaN value is NaN.
    cells = torch.where(position < end.unsqueeze(1), cells, first[:, 0])
    ahead = position - lengths.unsqueeze(1)  # [n, context], >= 0 for the tokens fed now
    if parents is None:
        visible = ahead.unsqueeze(1) <= torch.arange(T, device=q.device).unsqueeze(1)
    else:
        node = ahead.clamp(0, T - 1).unsqueeze(1).expand(n, T, context)
        visible = ancestors(parents).gather(2, node).bool() & (ahead < T).unsqueeze(1) | (ahead < 0).unsqueeze(1)
    mask = visible.unsqueeze(1).expand(n, R, T, context).reshape(n, 1, R * T, context)
    grouped = q.view(n, T, Hkv, R, D).permute(0, 2, 3, 1, 4).reshape(n, Hkv, R * T, D)
    rows = max(1, GATHER // (context * Hkv * D))
    parts = [
        functional.scaled_dot_product_attention(
            grouped[i : i + rows],
            _gather(k_cache, cells[i : i + rows], q.dtype),
            _gather(v_cache, cells[i : i + rows], q.dtype),
            attn_mask=mask[i : i + rows],
            scale=scale,
        )
        for i in range(0, n, rows)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(n, Hkv, R, T, D).permute(0, 3, 1, 2, 4).reshape(n * T, Hq, D)


def _attend_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    fed: tuple[int, ...],
    scale: float,
) -> torch.Tensor:
    """Prefill: every row by itself over exactly its context (lengths are read by the host)."""
    D = q.shape[2]
    block_size, Hkv = k_cache.shape[1:3]
    R = q.shape[1] // Hkv
    out = torch.empty_like(q)
    offset = 0
    for i, (length, count) in enumerate(zip(lengths.tolist(), fed, strict=True)):
        position = torch.arange(length + count, device=q.device)
        cells = (block_table[i, position // block_size] * block_size + position % block_size).unsqueeze(0)
        k, v = _gather(k_cache, cells, q.dtype), _gather(v_cache, cells, q.dtype)
        for first in range(0, count, TILE):
            T = min(TILE, count - first)
            seen = length + first + T
            tile = slice(offset + first, offset + first + T)
            grouped = q[tile].view(T, Hkv, R, D).permute(1, 2, 0, 3).reshape(1, Hkv, R * T, D)
            mask = position[:seen] <= position[length + first : seen].unsqueeze(1).repeat(R, 1)
            part = functional.scaled_dot_product_attention(
                grouped, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale
            )
            out[tile] = part.reshape(Hkv, R, T, D).permute(2, 0, 1, 3).reshape(T, Hkv * R, D)
        offset += count
    return out


def _flat(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(-1, cache.shape[2] * cache.shape[3])


def _gather(cache: torch.Tensor, cells: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values at cells [n, L], as [n, Hkv, L, D]."""
    rows = _flat(cache).index_select(0, cells.reshape(-1)).to(dtype)
    return rows.view(*cells.shape, *cache.shape[2:]).transpose(1, 2)
