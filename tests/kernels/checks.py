"""Comparisons the kernel tests share."""

from __future__ import annotations

import torch


def assert_exact(actual: torch.Tensor, exact: torch.Tensor, one_shot: torch.Tensor | None = None) -> None:
    """max|actual - exact| <= max(1e-5 max|exact|, 3 max|one_shot - exact|): `exact` float64, `one_shot` float32."""
    assert actual.shape == exact.shape
    assert exact.dtype == torch.float64
    if exact.numel() == 0:
        return
    bound = 1e-5 * exact.abs().max()
    if one_shot is not None:
        bound = torch.maximum(bound, 3 * (one_shot.double() - exact).abs().max())
    error = (actual.double() - exact).abs().max()
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


def paths(parents: torch.Tensor) -> list[list[list[int]]]:
    """For each row and node of parents [n, T], the nodes from the root to it."""
    found = []
    for row in parents.tolist():
        ways: list[list[int]] = []
        for node, parent in enumerate(row):
            ways.append(([] if parent < 0 else ways[parent]) + [node])
        found.append(ways)
    return found


def path_table(parents: torch.Tensor, node: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The path to one node in every row, as `path` [n, T] (-1 behind its end) and `count` [n]."""
    ways = [ways[node] for ways in paths(parents)]
    T = parents.shape[1]
    path = torch.tensor([way + [-1] * (T - len(way)) for way in ways], dtype=torch.int64).view(len(ways), T)
    return path, torch.tensor([len(way) for way in ways], dtype=torch.int64)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in a tensor no dimension of which is contiguous."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1], 2), float("nan") if x.is_floating_point() else -99)
    wide[..., 0] = x
    return wide.transpose(0, 1).contiguous().transpose(0, 1)[..., 0] if x.dim() > 1 else wide[..., 0]
