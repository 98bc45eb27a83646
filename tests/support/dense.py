"""A `StepContext` of one sequence without engine, pools or backends: KV and states of all layers in plain dicts."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from runtime.attention.backend import Recurrence, StateUpdates, StepContext
from runtime.spec import LayerSpec

Form = Literal["scan", "steps", "block"]


class RefContext(StepContext):
    """Every forward continues the sequence; `form` says which method of a recurrence runs it.

    By layer: `k`, `v` [T, kv_heads, D], `windows` [C, W - 1] and `states` [heads, V, K]; every forward moves them.
    """

    def __init__(self, layers: tuple[LayerSpec, ...], form: Form = "scan") -> None:
        self.form = form
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        self.windows: dict[int, torch.Tensor] = {}
        self.states: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(layers):
            if layer.attention is not None:
                heads = layer.attention.num_kv_heads
                self.k[i] = torch.zeros(0, heads, layer.attention.head_dim)
                self.v[i] = torch.zeros(0, heads, layer.attention.v_dim)
            if layer.recurrent is not None:
                self.windows[i] = torch.zeros(layer.recurrent.window_shape)
                self.states[i] = torch.zeros(layer.recurrent.state_shape)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        before = self.k[layer].shape[0]
        keys = self.k[layer] = torch.cat([self.k[layer], k])
        values = self.v[layer] = torch.cat([self.v[layer], v])
        shared = q.shape[1] // keys.shape[1]
        scores = torch.einsum("thd,shd->hts", q, keys.repeat_interleave(shared, dim=1)) * scale
        later = torch.arange(keys.shape[0])[None, :] > before + torch.arange(q.shape[0])[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, values.repeat_interleave(shared, dim=1))

    def mix(self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        width = recurrence.conv_weight.shape[1]
        inputs = torch.cat([self.windows[layer], x.T], dim=1)
        self.windows[layer] = inputs[:, inputs.shape[1] - width + 1 :].clone()
        mixed = functional.conv1d(
            inputs[None], recurrence.conv_weight[:, None], recurrence.conv_bias, groups=inputs.shape[0]
        )
        mixed = functional.silu(mixed).transpose(1, 2)
        state = self.states[layer][None]
        if self.form == "scan":
            y, end = recurrence.scan(mixed, gates[None], state)
        elif self.form == "steps":
            y, states = recurrence.steps(mixed, gates[None], state, None)
            end = states[:, -1]
        else:
            y, updates = recurrence.block(mixed, gates[None], state, None)
            end = _fold(state, updates)
        self.states[layer] = end[0]
        return y[0]


def _fold(state: torch.Tensor, updates: StateUpdates) -> torch.Tensor:
    shared = state.shape[1] // updates.k.shape[2]
    for t in range(updates.u.shape[1]):
        k = updates.k[:, t].repeat_interleave(shared, dim=1)
        state = state * updates.log_decay[:, t].exp()[..., None, None] + updates.u[:, t, :, :, None] * k[:, :, None]
    return state
