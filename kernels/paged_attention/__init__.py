"""Causal attention over a paged KV cache: caches [blocks, block_size, Hkv, D], contiguous; block 0 is padding.

A cell is the flat index block * block_size + offset. Cells that are no part of a row's context have no influence,
whatever they hold (NaN included).
"""

from __future__ import annotations

import torch

from kernels.paged_attention import reference
from kernels.paged_attention.reference import Layout
from kernels.registry import implementation

__all__ = ["Layout", "attend", "kv_write", "layout", "move_cells", "successive"]


def kv_write(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cells: torch.Tensor
) -> None:
    """Writes k, v [t, Hkv, D] at cells [t] int64, in place, in the cache's dtype. Only padding cells may repeat."""
    run = implementation("paged_attention.kv_write", k_cache.device.type, reference.kv_write)
    run(k_cache, v_cache, k, v, cells)


def move_cells(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies cells source[i] to target[i] (both [m] int64), in place; everything is read before anything is written."""
    run = implementation("paged_attention.move_cells", k_cache.device.type, reference.move_cells)
    run(k_cache, v_cache, source, target)


def layout(
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    fed: tuple[int, ...],
    max_context: int,
    block_size: int,
    parents: torch.Tensor | None = None,
) -> Layout:
    """What `attend` needs to know of a batch of rows; made once and used by every layer.

    Row i feeds fed[i] tokens, at positions lengths[i] ..., and block_table [n, B] int64 names its blocks, padded with
    0; lengths [n] int64 is what it had before. Token j of a row sees the positions before lengths[i], itself, and the
    j tokens before it - or, with parents [n, max(fed)] int64, its ancestors only (see `kernels.tree`; entries beyond
    fed[i] are ignored but must be < max(fed)). `max_context` is a host bound on lengths + fed.
    """
    run = implementation("paged_attention.layout", block_table.device.type, reference.layout)
    return run(block_table, lengths, fed, max_context, block_size, parents)


def successive(
    block_table: torch.Tensor, lengths: torch.Tensor, count: int, max_context: int, block_size: int
) -> list[Layout]:
    """The layouts of `count` steps that feed one token per row each: row i at lengths[i], lengths[i] + 1, ...

    Equal to `layout` with the lengths of each step, for less. `max_context` bounds lengths + count.
    """
    run = implementation("paged_attention.successive", block_table.device.type, reference.successive)
    return run(block_table, lengths, count, max_context, block_size)


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """Attention [t, Hq, D] of q [t, Hq, D], whose rows' keys and values are in the cache already.

    The rows of `layout` own the t tokens in order. Query head h reads key head h // (Hq // Hkv). Returns q's dtype.
    """
    run = implementation("paged_attention.attend", q.device.type, reference.attend)
    return run(q, k_cache, v_cache, layout, scale)
