"""Torch implementation of the snapshot commit."""

from __future__ import annotations

import torch


def gather_commit(
    pool: torch.Tensor,
    candidates: torch.Tensor,
    slots: torch.Tensor,
    candidate_rows: torch.Tensor,
    nodes: torch.Tensor,
) -> None:
    """See `kernels.state_commit.gather_commit`."""
    pool.index_copy_(0, slots, candidates[candidate_rows, nodes])
