"""Matrix products: projections that share an input are one matrix, filled from several tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from runtime.loader import Weight


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights live: the dtype of matrices (vectors are float32 always) and the device."""

    dtype: torch.dtype
    device: torch.device

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """An unfilled matrix [rows, columns]."""
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device)

    def vector(self, size: int) -> torch.Tensor:
        """An unfilled float32 vector [size]."""
        return torch.empty(size, dtype=torch.float32, device=self.device)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a fused projection that one checkpoint tensor `name`.weight (and .bias) fills."""

    name: str
    rows: int
    reorder: Callable[[torch.Tensor], torch.Tensor] | None = None


class Linear:
    """y = x W^T + b with W [rows of all parts, columns]. Inputs and outputs are float32 whatever W's dtype.

    Kept as W^T [columns, rows], and in memory so that the longer dimension is contiguous: for the few tokens of a
    decode step that is the order in which CPUs read a matrix fastest.
    """

    def __init__(self, parts: Seq[Part], columns: int, place: Placement, *, bias: bool = False) -> None:
        rows = sum(part.rows for part in parts)
        self._matrix = place.matrix(columns, rows) if rows >= columns else place.matrix(rows, columns).t()
        self._bias = torch.empty(rows, dtype=place.dtype, device=place.device) if bias else None
        self._parts = tuple(parts)
        self._cast = None if place.dtype == torch.float32 else place.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, columns] float32 -> [T, rows] float32."""
        wide = x if self._cast is None else x.to(self._cast)
        y = torch.mm(wide, self._matrix) if self._bias is None else torch.addmm(self._bias, wide, self._matrix)
        return y if self._cast is None else y.float()

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns residual + scale * (x W^T + b), [T, rows] float32, in one operation where the types allow."""
        if self._cast is None and self._bias is None:
            return torch.addmm(residual, x, self._matrix, alpha=scale)
        return torch.add(residual, self(x), alpha=scale)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        found, start = [], 0
        for part in self._parts:
            rows = slice(start, start + part.rows)
            start += part.rows
            shape = (part.rows, self._matrix.shape[0])
            found.append(Weight(f"{part.name}.weight", self._matrix[:, rows].t(), shape, part.reorder))
            if self._bias is not None:
                found.append(Weight(f"{part.name}.bias", self._bias[rows], (part.rows,), part.reorder))
        return found
