"""RMS normalisation with float32 weights."""

from __future__ import annotations

import torch

from kernels.norm import rms_norm
from runtime.layers.linear import Placement
from runtime.loader import Weight


class RMSNorm:
    """x / rms(x) * w over the last dimension. A zero-centred checkpoint stores w - 1; it is folded at load."""

    def __init__(self, name: str, size: int, eps: float, place: Placement, *, zero_centred: bool) -> None:
        self.weight = place.vector(size)
        self._eps = eps
        self._name = name
        self._zero_centred = zero_centred

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] float32 -> the same."""
        return rms_norm(x, self.weight, self._eps)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensor goes."""
        transform = centre_on_one if self._zero_centred else None
        return [Weight(f"{self._name}.weight", self.weight, tuple(self.weight.shape), transform)]


def over_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) over the last dimension, without a weight; [..., size] float32."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (norm * norm).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def centre_on_one(weight: torch.Tensor) -> torch.Tensor:
    """1 + w."""
    return weight + 1.0
