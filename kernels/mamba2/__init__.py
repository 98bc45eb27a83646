"""The Mamba-2 recurrence (state space duality): Dao & Gu 2024, arXiv:2405.21060.

    S_t = exp(dt_t A) S_{t-1} + (dt_t x_t) B_t^T        y_t = S_t C_t + D x_t

Shapes: x [n, T, H, P]; dt [n, T, H], after softplus and clamp, 0 on padded tokens, which leaves the state as it was;
A [H] negative; B, C [n, T, G, N], head h reads group h // (H // G); D [H]; state [n, H, P, N]. Everything is computed
in the state's dtype (float32); y comes back in x's. The state passed in is never written. Padded tokens must be finite.
"""

from __future__ import annotations

import torch

from kernels.mamba2 import reference
from kernels.registry import implementation


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For prefill: outputs [n, T, H, P] and the end state, in chunks of `chunk` tokens. Any T, 0 included."""
    run = implementation("mamba2.scan", x.device.type, reference.scan)
    return run(x, dt, A, B, C, D, state, chunk)


def steps(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For a few tokens: outputs [n, T, H, P] and the state after each node along its own path, [n, T, H, P, N].

    parents [n, T] int64 or None for a chain: see `kernels.tree`. The states are written to `out` if given. Memory
    beside them grows with T^2.
    """
    run = implementation("mamba2.steps", x.device.type, reference.steps)
    return run(x, dt, A, B, C, D, state, parents, out)


def block(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For a few tokens: outputs [n, T, H, P] without any new state, and what `state_fold` makes one from.

    The latter are log_decay [n, T, H], u = dt x [n, T, H, P] and k = B [n, T, G, N]. Memory grows with T^2.
    parents [n, T] int64 or None for a chain: see `kernels.tree`.
    """
    run = implementation("mamba2.block", x.device.type, reference.block)
    return run(x, dt, A, B, C, D, state, parents)
