"""The Mamba2 mixer: projection, convolution and selective state space, gated norm, projection."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels import mamba2
from kernels.norm import rms_norm_gated
from runtime.attention.backend import Recurrence, StateUpdates, StepContext
from runtime.layers.linear import Linear, Part, Placement
from runtime.loader import Weight
from runtime.spec import RecurrentSpec


@dataclass(frozen=True, slots=True)
class Mamba2Options:
    """`time_step_limit` clamps dt after softplus; `chunk` is the block length of a scan."""

    eps: float
    conv_bias: bool
    proj_bias: bool
    time_step_limit: tuple[float, float]
    chunk: int


class Mamba2Recurrence(Recurrence):
    """S_t = exp(dt A) S_{t-1} + dt x B^T, y_t = S_t C + D x: channels are [x | B | C], the one gate is dt."""

    def __init__(self, spec: RecurrentSpec, options: Mamba2Options, place: Placement) -> None:
        self._spec = spec
        self._chunk = options.chunk
        self._conv_weight = place.vector(spec.conv_channels * spec.conv_width).view(spec.conv_channels, -1)
        self._conv_bias = place.vector(spec.conv_channels) if options.conv_bias else None
        self.a = place.vector(spec.heads)
        self.d = place.vector(spec.heads)

    @property
    def conv_weight(self) -> torch.Tensor:
        """[channels, width]."""
        return self._conv_weight

    @property
    def conv_bias(self) -> torch.Tensor | None:
        """[channels] or None."""
        return self._conv_bias

    def scan(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [n, T, heads, V] and the end states [n, heads, V, K]."""
        values, b, c = self._split(x)
        return mamba2.scan(values, gates[..., 0], self.a, b, c, self.d, state, self._chunk)

    def steps(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [n, T, heads, V] and the state after each node [n, T, heads, V, K]."""
        values, b, c = self._split(x)
        return mamba2.steps(values, gates[..., 0], self.a, b, c, self.d, state, parents)

    def block(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, StateUpdates]:
        """Outputs [n, T, heads, V] and the updates that make any of the states."""
        values, b, c = self._split(x)
        y, log_decay, u, k = mamba2.block(values, gates[..., 0], self.a, b, c, self.d, state, parents)
        return y, StateUpdates(log_decay, u, k)

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits x [n, T, channels] -> values [n, T, heads, V], B and C [n, T, groups, K]."""
        spec = self._spec
        n, num_tokens, _ = x.shape
        inner = spec.heads * spec.v_dim
        size = spec.groups * spec.k_dim
        values = x[..., :inner].view(n, num_tokens, spec.heads, spec.v_dim)
        b = x[..., inner : inner + size].view(n, num_tokens, spec.groups, spec.k_dim)
        c = x[..., inner + size :].view(n, num_tokens, spec.groups, spec.k_dim)
        return values, b, c


class Mamba2Mixer:
    """`name` is the published prefix of in_proj, conv1d, dt_bias, A_log, D, norm and out_proj."""

    def __init__(
        self, name: str, spec: RecurrentSpec, hidden_size: int, options: Mamba2Options, place: Placement
    ) -> None:
        self._name = name
        self._spec = spec
        self._eps = options.eps
        inner = spec.heads * spec.v_dim
        self._inner = inner
        self._group_size = None if spec.groups == 1 else inner // spec.groups
        self._in = Linear(
            [Part(f"{name}.in_proj", inner + spec.conv_channels + spec.heads)],
            hidden_size,
            place,
            bias=options.proj_bias,
        )
        self._out = Linear([Part(f"{name}.out_proj", hidden_size)], inner, place, bias=options.proj_bias)
        self._dt_bias = place.vector(spec.heads)
        self._norm = place.vector(inner)
        self._recurrence = Mamba2Recurrence(spec, options, place)
        low, high = options.time_step_limit
        self._limit = None if low <= 0.0 and math.isinf(high) else (low, high)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, layer: int, ctx: StepContext, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Returns residual + scale * mixer(x), all [T, hidden] float32."""
        projected = self._in(x)
        z = projected[:, : self._inner]
        channels = projected[:, self._inner : self._inner + self._spec.conv_channels]
        dt = functional.softplus(projected[:, self._inner + self._spec.conv_channels :] + self._dt_bias)
        if self._limit is not None:
            dt = dt.clamp(self._limit[0], self._limit[1])
        y = ctx.mix(layer, self._recurrence, channels, dt.unsqueeze(-1))
        y = rms_norm_gated(
            y.reshape(x.shape[0], -1), z, self._norm, self._eps, norm_before_gate=False, group_size=self._group_size
        )
        return self._out.add_to(residual, y, scale)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        name, spec, mix = self._name, self._spec, self._recurrence
        heads = (spec.heads,)
        found = self._in.weights() + self._out.weights()
        found += conv_weights(name, mix.conv_weight, mix.conv_bias)
        found.append(Weight(f"{name}.dt_bias", self._dt_bias, heads))
        found.append(Weight(f"{name}.A_log", mix.a, heads, negative_exp))
        found.append(Weight(f"{name}.D", mix.d, heads))
        found.append(Weight(f"{name}.norm.weight", self._norm, (self._inner,)))
        return found


def conv_weights(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> list[Weight]:
    """The depthwise convolution, stored [channels, 1, width]."""
    channels, width = weight.shape
    found = [Weight(f"{name}.conv1d.weight", weight, (channels, 1, width), drop_middle)]
    if bias is not None:
        found.append(Weight(f"{name}.conv1d.bias", bias, (channels,)))
    return found


def drop_middle(stored: torch.Tensor) -> torch.Tensor:
    """[channels, 1, width] -> [channels, width]."""
    return stored[:, 0]


def negative_exp(stored: torch.Tensor) -> torch.Tensor:
    """A_log -> A = -exp(A_log)."""
    return -stored.exp()
