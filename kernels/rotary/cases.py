"""Inputs for tests and benchmarks of the rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cases import generator


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of `kernels.rotary.apply_rotary`, with cos, sin [t, r] before `full_width`."""

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Inputs of t tokens, H heads of D of which 2 r are rotated."""

    t: int
    H: int
    D: int
    r: int


SHAPES: dict[str, Shape] = {
    "no tokens": Shape(0, 2, 8, 4),
    "whole": Shape(5, 4, 16, 8),
    "partial": Shape(5, 6, 64, 8),
    "none": Shape(3, 2, 8, 0),
}


def make(shape: Shape, *, seed: int = 0, device: str = "cpu") -> Case:
    """Random angles."""
    source = generator(seed)
    angle = torch.rand(shape.t, shape.r, generator=source) * 1000
    return Case(
        x=torch.randn(shape.t, shape.H, shape.D, generator=source).to(device),
        cos=angle.cos().to(device),
        sin=angle.sin().to(device),
    )
