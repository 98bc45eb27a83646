"""The gated delta rule: Yang et al. 2024, arXiv:2412.06464; its chunk form: arXiv:2406.06484.

    S' = exp(g_t) S_{t-1}      u_t = beta_t (v_t - S' k_t)      S_t = S' + u_t k_t^T      y_t = S_t q_t

Shapes: q, k [n, T, Hk, K], normalised in here (x rsqrt(|x|^2 + 1e-6); q also times K^-0.5); v [n, T, Hv, V], value
head h reads key head h // (Hv // Hk); g [n, T, Hv] the log decay, <= 0; beta [n, T, Hv]; state [n, Hv, V, K]. Padded
tokens have g = beta = 0, which leaves the state as it was, and must be finite. Everything is computed in the state's
dtype (float32); y comes back in v's. The state passed in is never written.
"""

from __future__ import annotations

import torch

from kernels.gated_delta import reference
from kernels.registry import implementation


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For prefill: outputs [n, T, Hv, V] and the end state, in chunks of `chunk` tokens. Any T, 0 included."""
    run = implementation("gated_delta.scan", v.device.type, reference.scan)
    return run(q, k, v, g, beta, state, chunk)


def steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For a few tokens: outputs [n, T, Hv, V] and the state after each node along its own path, [n, T, Hv, V, K].

    parents [n, T] int64 or None for a chain: see `kernels.tree`. The states are written to `out` if given. Memory
    beside them grows with T^2.
    """
    run = implementation("gated_delta.steps", v.device.type, reference.steps)
    return run(q, k, v, g, beta, state, parents, out)


def block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For a few tokens: outputs [n, T, Hv, V] without any new state, and what `state_fold` makes one from.

    The latter are log_decay = g [n, T, Hv], u [n, T, Hv, V] and the normalised k [n, T, Hk, K]. Memory grows with T^2.
    parents [n, T] int64 or None for a chain: see `kernels.tree`.
    """
    run = implementation("gated_delta.block", v.device.type, reference.block)
    return run(q, k, v, g, beta, state, parents)
