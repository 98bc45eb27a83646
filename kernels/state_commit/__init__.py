"""The snapshot strategy's commit: of the candidates a verification wrote, one per row becomes the slot's state."""

from __future__ import annotations

import torch

from kernels.registry import implementation
from kernels.state_commit import reference


def gather_commit(
    pool: torch.Tensor,
    candidates: torch.Tensor,
    slots: torch.Tensor,
    candidate_rows: torch.Tensor,
    nodes: torch.Tensor,
) -> None:
    """pool[slots[i]] = candidates[candidate_rows[i], nodes[i]], in place.

    pool [S, ...], candidates [rows, T, ...] of the same dtype, slots, candidate_rows, nodes [n] int64. Slots must be
    distinct and all indices in range: the caller checks.
    """
    run = implementation("state_commit.gather_commit", pool.device.type, reference.gather_commit)
    run(pool, candidates, slots, candidate_rows, nodes)
