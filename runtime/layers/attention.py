"""Full attention with grouped heads: plain (Granite), or with q/k norm and an output gate (Qwen3.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.rotary import apply_rotary
from runtime.attention.backend import StepContext
from runtime.layers.linear import Linear, Part, Placement
from runtime.layers.norm import centre_on_one, over_rms
from runtime.layers.rotary import Angles
from runtime.loader import Weight
from runtime.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """`scale` of the scores; `bias` on the projections; `gated`: q_proj holds [q | gate] per head."""

    scale: float
    bias: bool = False
    gated: bool = False
    norm_eps: float | None = None


class Attention:
    """One matrix makes [gate | q | k | v]; q and k lie side by side, so norm and rotation run once on both.

    `name` is the published prefix of q_proj, k_proj, v_proj, o_proj (and q_norm, k_norm when `norm_eps` is set: an
    RMS norm per head with zero-centred weights).
    """

    def __init__(
        self, name: str, spec: AttentionSpec, hidden_size: int, options: AttentionOptions, place: Placement
    ) -> None:
        self._name = name
        self._spec = spec
        self._scale = options.scale
        self._eps = options.norm_eps or 0.0
        self._q_size = spec.num_heads * spec.head_dim
        self._gate_size = self._q_size if options.gated else 0
        k_size = spec.num_kv_heads * spec.head_dim
        self._qk_end = self._gate_size + self._q_size + k_size
        parts = [
            Part(f"{name}.q_proj", self._gate_size + self._q_size, self._gate_first if options.gated else None),
            Part(f"{name}.k_proj", k_size),
            Part(f"{name}.v_proj", spec.num_kv_heads * spec.v_dim),
        ]
        self._qkv = Linear(parts, hidden_size, place, bias=options.bias)
        out = Part(f"{name}.o_proj", hidden_size)
        self._out = Linear([out], spec.num_heads * spec.v_dim, place, bias=options.bias)
        heads = spec.num_heads + spec.num_kv_heads
        self._norm = (
            None if options.norm_eps is None else place.vector(heads * spec.head_dim).view(heads, spec.head_dim)
        )

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        angles: Angles | None,
        ctx: StepContext,
        *,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Returns residual + scale * attention(x), all [T, hidden] float32; without angles nothing is rotated."""
        spec = self._spec
        num_tokens = x.shape[0]
        fused = self._qkv(x)
        qk = fused[:, self._gate_size : self._qk_end].view(num_tokens, -1, spec.head_dim)
        if self._norm is not None:
            qk = over_rms(qk, self._eps) * self._norm
        if angles is not None:
            qk = apply_rotary(qk, angles.cos, angles.sin, angles.partner)
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        v = fused[:, self._qk_end :].view(num_tokens, spec.num_kv_heads, spec.v_dim)
        mixed = ctx.attend(layer, q, k, v, self._scale)
        mixed = mixed.reshape(num_tokens, -1)
        if self._gate_size:
            mixed = mixed * torch.sigmoid(fused[:, : self._gate_size])
        return self._out.add_to(residual, mixed, scale)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        found = self._qkv.weights() + self._out.weights()
        if self._norm is not None:
            shape = (self._spec.head_dim,)
            heads = self._spec.num_heads
            found.append(Weight(f"{self._name}.q_norm.weight", self._norm[:heads], shape, centre_on_one))
            found.append(Weight(f"{self._name}.k_norm.weight", self._norm[heads:], shape, centre_on_one))
        return found

    def _gate_first(self, stored: torch.Tensor) -> torch.Tensor:
        """Rows [q | gate] per head -> all gates, then all q."""
        halves = stored.view(self._spec.num_heads, 2, self._spec.head_dim, -1).transpose(0, 1)
        return halves.flip(0).reshape(stored.shape)
