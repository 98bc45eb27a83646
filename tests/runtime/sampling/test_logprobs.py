"""Logprobs are of the model's own distribution, and the same with speculation and without."""

from __future__ import annotations

import pytest
import torch

from runtime.api import SamplingParams
from tests.runtime.sampling.toy import Bench, Item, ToyModel, forward_batch, logits_of, text

PROMPT = [1, 2, 3]


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_equal_to_log_softmax_with_and_without_drafts(num_top: int, temperature: float) -> None:
    bench = Bench(ToyModel(vocab=24))
    params = SamplingParams(
        max_tokens=20, temperature=temperature, ignore_eos=True, logprobs=num_top, presence_penalty=1.0, top_k=9
    )
    plain = bench.generate(params, PROMPT)
    expected = text(plain)
    spec = bench.generate(params, PROMPT, lambda tokens: [*expected[len(tokens) - 3 :][:2], 0])
    assert text(spec) == expected
    entries = [entry for told in plain for entry in told.logprobs]
    assert len(entries) == len(expected)
    assert [entry for told in spec for entry in told.logprobs] == entries
    tokens = list(PROMPT)
    for token, (chosen, top_tokens, top_values) in zip(expected, entries, strict=True):
        reference = torch.log_softmax(bench.model.logits(tokens).double(), 0)
        assert chosen == pytest.approx(float(reference[token]), abs=1e-5)
        order = reference.sort(descending=True)
        assert top_tokens == order.indices[: max(num_top, 1)].tolist()
        assert top_values == pytest.approx(order.values[: max(num_top, 1)].tolist(), abs=1e-5)
        tokens.append(token)


def test_only_for_rows_that_asked() -> None:
    bench = Bench(ToyModel(), k_max=3)
    bench.bind(1, SamplingParams(max_tokens=9, temperature=0.0), PROMPT)
    bench.bind(2, SamplingParams(max_tokens=9, temperature=0.0, logprobs=2), PROMPT)
    bench.bind(3, SamplingParams(max_tokens=9, temperature=0.0, logprobs=4), PROMPT)
    items = [Item(1, PROMPT, [1, 2]), Item(2, PROMPT), Item(3, PROMPT, [1])]
    found = bench.verifier.judge(forward_batch(items), logits_of(bench.model, items)).logprobs
    assert found is not None
    assert found.chosen.shape == (3, 4) and found.top_tokens.shape == found.top_values.shape == (3, 4, 4)
    assert not found.chosen[0].any() and found.chosen[1, 0] < 0 and found.chosen[2, 0] < 0
    nobody = bench.verifier.judge(forward_batch(items[:1]), logits_of(bench.model, items[:1]))
    assert nobody.logprobs is None


def test_ties_are_listed_by_id() -> None:
    bench = Bench(ToyModel())
    bench.model.table[:] = 0.0
    (told,) = bench.generate(SamplingParams(max_tokens=1, temperature=0.0, logprobs=5), PROMPT)
    assert told.logprobs[0][1] == [0, 1, 2, 3, 4]
