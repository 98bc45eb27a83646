"""The oracle itself, against transformers: logits, recurrent states, convolution windows, KV."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.models.common import directory, hf_logits, hf_model, prompt, ref
from tests.support.tiny import MODELS


@pytest.mark.parametrize("name", [*MODELS, "asset"])
def test_oracle_logits_equal_transformers(name: str) -> None:
    tokens = prompt(name)[:90]
    expected = hf_logits(directory(name), tokens).double()
    assert (ref(name).logits(tokens) - expected).abs().max() <= 3e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["qwen", "qwen-one-group", "granite", "granite-groups-rope"])
@pytest.mark.parametrize("length", [2, 5, 70])
def test_oracle_states_equal_transformers_cache(name: str, length: int) -> None:
    tokens = prompt(name)[:length]
    cache = hf_model(directory(name))(input_ids=torch.tensor([tokens]), use_cache=True).cache
    trace = ref(name).trace(tokens, [length])
    for i, found in trace.states[length].items():
        state = cache.get_recurrent_state(i, state_idx=0)[0].double()
        state = state.transpose(1, 2) if name.startswith("qwen") else state
        assert (found.state - state).abs().max() <= 1e-5 * state.abs().max()
        window = cache.get_conv_state(i, state_idx=0)[0].double()
        width = found.window.shape[1]
        assert (found.window - window[:, -width:]).abs().max() <= 1e-5 * window.abs().max()
    for i, kv in trace.kv.items():
        for found, stored in ((kv.k, cache.layers[i].keys), (kv.v, cache.layers[i].values)):
            expected = stored[0].transpose(0, 1).double()
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_marks_are_prefixes() -> None:
    tokens = prompt("qwen")[:12]
    trace = ref("qwen").trace(tokens, range(13))
    for n in (0, 1, 2, 3, 7, 12):
        for i, found in trace.states[n].items():
            if n:
                alone = ref("qwen").states(tokens[:n])[i]
                assert torch.allclose(found.state, alone.state, rtol=0, atol=1e-12)
                assert torch.allclose(found.window, alone.window, rtol=0, atol=1e-12)
            else:
                assert not found.state.any()
                assert not found.window.any()


def test_float32_oracle_is_close_to_float64() -> None:
    tokens = prompt("granite")[:60]
    wide, narrow = ref("granite").logits(tokens), ref("granite", torch.float32).logits(tokens)
    assert (wide - narrow).abs().max() <= 3e-5 * wide.abs().max()


def test_greedy_feeds_its_own_tokens() -> None:
    oracle = ref("qwen")
    tokens = [5, 9, 77]
    out = oracle.greedy(tokens, 4)
    assert len(set(out)) > 1
    assert out == oracle.logits(tokens + out[:-1])[2:].argmax(-1).tolist()
