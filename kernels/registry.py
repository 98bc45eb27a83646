"""Which implementation of an op runs on which device: one literal table, resolved once per op and device type."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "causal_conv1d.conv_block": {"reference": "kernels.causal_conv1d.reference:conv_block"},
    "causal_conv1d.conv_window": {"reference": "kernels.causal_conv1d.reference:conv_window"},
    "causal_conv1d.conv_windows_all": {"reference": "kernels.causal_conv1d.reference:conv_windows_all"},
    "gated_delta.block": {"reference": "kernels.gated_delta.reference:block"},
    "gated_delta.scan": {"reference": "kernels.gated_delta.reference:scan"},
    "gated_delta.steps": {"reference": "kernels.gated_delta.reference:steps"},
    "gumbel.counter_gumbel": {"reference": "kernels.gumbel.reference:counter_gumbel"},
    "gumbel.counter_gumbel_at": {"reference": "kernels.gumbel.reference:counter_gumbel_at"},
    "mamba2.block": {"reference": "kernels.mamba2.reference:block"},
    "mamba2.scan": {"reference": "kernels.mamba2.reference:scan"},
    "mamba2.steps": {"reference": "kernels.mamba2.reference:steps"},
    "norm.rms_norm": {"reference": "kernels.norm.reference:rms_norm"},
    "norm.rms_norm_gated": {"reference": "kernels.norm.reference:rms_norm_gated"},
    "paged_attention.attend": {"reference": "kernels.paged_attention.reference:attend"},
    "paged_attention.layout": {"reference": "kernels.paged_attention.reference:layout"},
    "paged_attention.successive": {"reference": "kernels.paged_attention.reference:successive"},
    "paged_attention.kv_write": {"reference": "kernels.paged_attention.reference:kv_write"},
    "paged_attention.move_cells": {"reference": "kernels.paged_attention.reference:move_cells"},
    "rotary.apply_rotary": {"reference": "kernels.rotary.reference:apply_rotary"},
    "state_commit.gather_commit": {"reference": "kernels.state_commit.reference:gather_commit"},
    "state_fold.fold": {"reference": "kernels.state_fold.reference:fold"},
    "state_fold.unroll": {"reference": "kernels.state_fold.reference:unroll"},
}

PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("reference",),
    "cuda": ("triton", "reference"),
}

_resolved: dict[tuple[str, str], Callable[..., Any]] = {}


def load(op: str, name: str, like: Function) -> Function:
    """Imports implementation `name` of `op`; `like` is the reference, whose signature every implementation has."""
    del like
    module, attribute = IMPLEMENTATIONS[op][name].split(":")
    return cast(Function, vars(import_module(module))[attribute])


def implementation(op: str, device_type: str, like: Function) -> Function:
    """The preferred implementation of `op` on a device type. A dictionary look-up after the first call."""
    found = _resolved.get((op, device_type))
    if found is None:
        available = IMPLEMENTATIONS[op]
        name = next(name for name in PREFERENCE.get(device_type, ("reference",)) if name in available)
        found = _resolved[op, device_type] = load(op, name, like)
    return cast(Function, found)
