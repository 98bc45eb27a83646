"""After any pieces the context holds the oracle's KV, windows and states (design 9c); padding changes none of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.attention.backend import Recurrence, StepContext
from tests.runtime.models.common import chunked_logits, loaded, prompt, ref
from tests.support.dense import Form
from tests.support.tiny import MODELS


def close(found: torch.Tensor, exact: torch.Tensor, one_shot: torch.Tensor) -> None:
    error = (found.double() - exact).abs().max().item()
    allowed = max(1e-5 * exact.abs().max().item(), 3 * (one_shot.double() - exact).abs().max().item())
    assert error <= allowed, (error, allowed)


@pytest.mark.parametrize("name", [*MODELS, "asset"])
@pytest.mark.parametrize(
    ("sizes", "form", "length"),
    [((1,), "steps", 2), ((3, 1), "block", 11), ((8,), "steps", 70), ((33, 1), "scan", 70)],
    ids=str,
)
def test_states_equal_the_oracle(name: str, sizes: tuple[int, ...], form: Form, length: int) -> None:
    _, ctx = chunked_logits(name, itertools.cycle(sizes), form, length)
    tokens = prompt(name)[:length]
    exact, rough = ref(name).trace(tokens, [length]), ref(name, torch.float32).trace(tokens, [length])
    assert exact.states[length].keys() == ctx.states.keys()
    assert exact.kv.keys() == ctx.k.keys()
    for i, state in exact.states[length].items():
        close(ctx.states[i], state.state, rough.states[length][i].state)
        close(ctx.windows[i], state.window, rough.states[length][i].window)
    for i, kv in exact.kv.items():
        close(ctx.k[i], kv.k, rough.kv[i].k)
        close(ctx.v[i], kv.v, rough.kv[i].v)


class Spy(StepContext):
    """Collects what layers ask for; answers with zeros."""

    def __init__(self) -> None:
        self.mixed: list[tuple[int, Recurrence, torch.Tensor, torch.Tensor]] = []
        self.attended: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self.attended.append((layer, tuple(q.shape), tuple(v.shape)))
        return torch.zeros_like(q)

    def mix(self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        self.mixed.append((layer, recurrence, x, gates))
        spec = loaded(self.name).model.spec.layers[layer].recurrent
        assert spec is not None
        return x.new_zeros(x.shape[0], spec.heads, spec.v_dim)

    name = ""


@pytest.mark.parametrize("name", list(MODELS))
def test_what_layers_hand_over_matches_the_spec(name: str) -> None:
    model = loaded(name).model
    spy = Spy()
    spy.name = name
    with torch.inference_mode():
        model.forward(torch.tensor([1, 2, 3]), torch.arange(3), spy)
    assert [layer for layer, _, _ in spy.attended] == list(model.spec.attention_layers)
    assert [layer for layer, _, _, _ in spy.mixed] == list(model.spec.recurrent_layers)
    for layer, q, v in spy.attended:
        spec = model.spec.layers[layer].attention
        assert spec is not None
        assert q == (3, spec.num_heads, spec.head_dim)
        assert v == (3, spec.num_kv_heads, spec.v_dim)
    for layer, recurrence, x, gates in spy.mixed:
        recurrent = model.spec.layers[layer].recurrent
        assert recurrent is not None
        assert x.shape == (3, recurrent.conv_channels)
        assert gates.shape == (3, recurrent.heads, recurrent.gates)
        assert recurrence.conv_weight.shape == (recurrent.conv_channels, recurrent.conv_width)
        assert recurrent.window_shape == (recurrent.conv_channels, recurrent.conv_width - 1)
        assert x.dtype == gates.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen", "granite", "granite-groups-rope"])
def test_padding_is_neutral(name: str) -> None:
    """Places with zero gates leave states and updates as they were, whatever the convolution left in them."""
    spy = Spy()
    spy.name = name
    with torch.inference_mode():
        loaded(name).model.forward(torch.tensor(prompt(name)[:5]), torch.arange(5), spy)
    layer, recurrence, _, gates = spy.mixed[0]
    spec = loaded(name).model.spec.layers[layer].recurrent
    assert spec is not None
    generator = torch.Generator().manual_seed(3)
    state = torch.randn((1, *spec.state_shape), generator=generator)
    x = torch.randn((1, 5, spec.conv_channels), generator=generator)
    padded_x = torch.cat([x, torch.randn((1, 3, spec.conv_channels), generator=generator)], dim=1)
    padded_gates = torch.cat([gates[None], gates.new_zeros(1, 3, *gates.shape[1:])], dim=1)
    y, end = recurrence.scan(x, gates[None], state)
    padded_y, padded_end = recurrence.scan(padded_x, padded_gates, state)
    assert torch.allclose(padded_y[:, :5], y, rtol=0, atol=1e-5)
    assert torch.allclose(padded_end, end, rtol=0, atol=1e-5)
    _, states = recurrence.steps(padded_x, padded_gates, state, None)
    assert torch.equal(states[:, 4], states[:, 7])
    _, updates = recurrence.block(padded_x, padded_gates, state, None)
    assert not updates.log_decay[:, 5:].any()
    assert not updates.u[:, 5:].any()
