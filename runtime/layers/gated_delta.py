"""The gated delta-net mixer of Qwen3.5: projection, convolution and gated delta rule, gated norm, projection."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels import gated_delta
from kernels.norm import rms_norm_gated
from runtime.attention.backend import Recurrence, StateUpdates, StepContext
from runtime.layers.linear import Linear, Part, Placement
from runtime.layers.mamba2 import conv_weights, negative_exp
from runtime.loader import Weight
from runtime.spec import RecurrentSpec

CHUNK = 64


class GatedDeltaRecurrence(Recurrence):
    """S' = exp(g) S_{t-1}, S_t = S' + beta (v - S' k) k^T, y_t = S_t q: channels [q | k | v], gates (g, beta)."""

    def __init__(self, spec: RecurrentSpec, place: Placement) -> None:
        self._spec = spec
        self._conv_weight = place.vector(spec.conv_channels * spec.conv_width).view(spec.conv_channels, -1)

    @property
    def conv_weight(self) -> torch.Tensor:
        """[channels, width]."""
        return self._conv_weight

    @property
    def conv_bias(self) -> torch.Tensor | None:
        """None."""
        return None

    def scan(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [n, T, heads, V] and the end states [n, heads, V, K]."""
        q, k, v = self._split(x)
        return gated_delta.scan(q, k, v, gates[..., 0], gates[..., 1], state, CHUNK)

    def steps(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [n, T, heads, V] and the state after each node [n, T, heads, V, K]."""
        q, k, v = self._split(x)
        return gated_delta.steps(q, k, v, gates[..., 0], gates[..., 1], state, parents)

    def block(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, StateUpdates]:
        """Outputs [n, T, heads, V] and the updates that make any of the states."""
        q, k, v = self._split(x)
        y, log_decay, u, key = gated_delta.block(q, k, v, gates[..., 0], gates[..., 1], state, parents)
        return y, StateUpdates(log_decay, u, key)

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits x [n, T, channels] -> q, k [n, T, groups, K] and v [n, T, heads, V]."""
        spec = self._spec
        n, num_tokens, _ = x.shape
        size = spec.groups * spec.k_dim
        q = x[..., :size].view(n, num_tokens, spec.groups, spec.k_dim)
        k = x[..., size : 2 * size].view(n, num_tokens, spec.groups, spec.k_dim)
        v = x[..., 2 * size :].view(n, num_tokens, spec.heads, spec.v_dim)
        return q, k, v


class GatedDeltaMixer:
    """`name` is the published prefix of in_proj_{qkv,z,b,a}, conv1d, dt_bias, A_log, norm and out_proj.

    One matrix makes [qkv | z | b | a].
    """

    def __init__(self, name: str, spec: RecurrentSpec, hidden_size: int, eps: float, place: Placement) -> None:
        self._name = name
        self._spec = spec
        self._eps = eps
        inner = spec.heads * spec.v_dim
        self._z_end = spec.conv_channels + inner
        parts = [
            Part(f"{name}.in_proj_qkv", spec.conv_channels),
            Part(f"{name}.in_proj_z", inner),
            Part(f"{name}.in_proj_b", spec.heads),
            Part(f"{name}.in_proj_a", spec.heads),
        ]
        self._in = Linear(parts, hidden_size, place)
        self._out = Linear([Part(f"{name}.out_proj", hidden_size)], inner, place)
        self._a = place.vector(spec.heads)
        self._dt_bias = place.vector(spec.heads)
        self._norm = place.vector(spec.v_dim)
        self._recurrence = GatedDeltaRecurrence(spec, place)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, layer: int, ctx: StepContext, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Returns residual + scale * mixer(x), all [T, hidden] float32."""
        spec = self._spec
        num_tokens = x.shape[0]
        projected = self._in(x)
        z = projected[:, spec.conv_channels : self._z_end].view(num_tokens, spec.heads, spec.v_dim)
        beta = torch.sigmoid(projected[:, self._z_end : self._z_end + spec.heads])
        g = functional.softplus(projected[:, self._z_end + spec.heads :] + self._dt_bias) * self._a
        channels = projected[:, : spec.conv_channels]
        y = ctx.mix(layer, self._recurrence, channels, torch.stack((g, beta), dim=-1))
        y = rms_norm_gated(y, z, self._norm, self._eps, norm_before_gate=True)
        return self._out.add_to(residual, y.reshape(num_tokens, -1), scale)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        name, heads = self._name, (self._spec.heads,)
        found = self._in.weights() + self._out.weights()
        found += conv_weights(name, self._recurrence.conv_weight, None)
        found.append(Weight(f"{name}.dt_bias", self._dt_bias, heads))
        found.append(Weight(f"{name}.A_log", self._a, heads, negative_exp))
        found.append(Weight(f"{name}.norm.weight", self._norm, (self._spec.v_dim,)))
        return found
