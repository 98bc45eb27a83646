"""The sampled law is the exact one: chi-square against the float64 oracle, with fixed seeds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chisquare

from runtime.api import SamplingParams
from runtime.sampling.positions import Positions
from runtime.sampling.sampler import sample
from runtime.sampling.store import SamplingStore
from tests.runtime.sampling.oracle import law
from tests.runtime.sampling.toy import CPU, Bench, Item, ToyModel

PROMPT = [1, 2, 2, 5]
OUTPUT = [3, 3, 0]
DRAFTS = [3, 6]
DRAFTLESS = torch.empty((1, 0), dtype=torch.int64)
FEATURES: dict[str, dict[str, object]] = {
    "none": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.4},
    "bias": {"logit_bias": {0: 1.5, 4: -2.0}},
    "all": {
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 0.8,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.6,
        "logit_bias": {1: 1.0},
    },
}


def assert_law(tokens: torch.Tensor, expected: Sequence[float]) -> None:
    counts = torch.bincount(tokens, minlength=len(expected)).to(torch.float64)
    wanted = torch.tensor(expected, dtype=torch.float64) * counts.sum()
    assert counts[wanted == 0].sum() == 0
    some = wanted > 5
    rest = wanted[~some].sum()
    if rest > 5:
        counts = torch.cat([counts[some], counts[~some].sum().unsqueeze(0)])
        wanted = torch.cat([wanted[some], rest.unsqueeze(0)])
    else:
        counts, wanted = counts[some], wanted[some]
    if len(counts) > 1:
        assert chisquare(counts, wanted * (counts.sum() / wanted.sum())).pvalue > 0.001


def params_of(feature: str, temperature: float, seed: int = 11) -> SamplingParams:
    return SamplingParams(max_tokens=9, temperature=temperature, seed=seed, **FEATURES[feature])  # type: ignore[arg-type]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_sampled_law(feature: str, temperature: float, over: str) -> None:
    num, num_seeds = 30_000, 100
    bench = Bench(ToyModel(scale=1.2), num_slots=num_seeds)
    logits = bench.model.logits([4, 2])
    params = params_of(feature, temperature)
    if over == "positions":
        bench.bind(3, params, PROMPT, OUTPUT)
        slots, positions = torch.full((num,), 3), torch.arange(num) + 7
    else:
        for slot in range(num_seeds):
            bench.bind(slot, params_of(feature, temperature, seed=slot * 7919 - 5000), PROMPT, OUTPUT)
        slots, positions = torch.arange(num) % num_seeds, torch.arange(num) // num_seeds + 7
    at = Positions(
        slots=slots,
        positions=positions,
        drafts=torch.tensor([DRAFTS] * num),
        max_top_k=params.top_k,
        all_top_k=params.top_k > 0,
    )
    tokens = sample(logits.repeat(num, 1), at, store=bench.store, features=bench.store.features([3]), drawn=None)
    assert_law(tokens, law(logits.tolist(), params, PROMPT, OUTPUT + DRAFTS))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_law_of_a_verified_pair(temperature: float) -> None:
    """First and second token of a verified block, with a draft that is sometimes right: the joint law is exact."""
    num, draft = 1_500, 2
    model = ToyModel(vocab=4, scale=1.0, seed=3)
    bench = Bench(model, num_slots=num, k_max=1)
    for slot in range(num):
        bench.bind(slot, SamplingParams(max_tokens=9, temperature=temperature, seed=slot), [0, 1])
    told = bench.judge([Item(slot, [0, 1], [draft]) for slot in range(num)])
    params = SamplingParams(max_tokens=9, temperature=temperature)
    first = law(model.logits([0, 1]).tolist(), params, [], [])
    assert_law(torch.tensor([row.emitted[0] for row in told]), first)
    assert all((len(row.emitted) == 2) == (row.emitted[0] == draft) for row in told)
    second = law(model.logits([0, 1, draft]).tolist(), params, [], [])
    assert_law(torch.tensor([row.emitted[1] for row in told if len(row.emitted) == 2]), second)


def test_noise_of_positions_is_independent() -> None:
    """Pairs of consecutive positions fall like independent draws."""
    num = 40_000
    bench = Bench(ToyModel(vocab=4, scale=1.0))
    params = SamplingParams(max_tokens=9, seed=1)
    bench.bind(1, params, [0])
    logits = bench.model.logits([1, 2])
    at = Positions(
        torch.full((num,), 1), torch.arange(num), torch.empty((num, 0), dtype=torch.int64), max_top_k=0, all_top_k=False
    )
    tokens = sample(logits.repeat(num, 1), at, store=bench.store, features=bench.store.features([1]), drawn=None)
    one = law(logits.tolist(), params, [], [])
    assert_law(tokens[:-1:2] * 4 + tokens[1::2], [a * b for a in one for b in one])


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_k": 20}, {"top_k": 99, "top_p": 0.7, "min_p": 0.01}])
def test_looking_at_candidates_only_changes_nothing(filters: dict[str, float]) -> None:
    """Whether a batch can be narrowed to its top_k candidates depends on its mates, so it must not show."""
    num, vocab = 2_000, 300
    bench = Bench(ToyModel(vocab=2), num_slots=2)
    bench.store = SamplingStore(2, vocab, CPU)
    bench.bind(1, SamplingParams(max_tokens=9, seed=5, **filters), PROMPT[:1])  # type: ignore[arg-type]
    logits = (torch.randn(num, vocab, generator=torch.Generator().manual_seed(2)) * 4).round() / 2
    top_k = int(filters["top_k"])
    features = bench.store.features([1])
    tokens = [
        sample(
            logits,
            Positions(torch.ones(num, dtype=torch.int64), torch.arange(num), DRAFTLESS.expand(num, 0), top_k, narrow),
            store=bench.store,
            features=features,
            drawn=None,
        )
        for narrow in (True, False)
    ]
    assert torch.equal(tokens[0], tokens[1])
    assert len(tokens[0].unique()) > 100


def test_rows_with_different_filters_in_one_batch() -> None:
    num, each = 24_000, [{"top_k": 2}, {"top_k": 5}, {}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 1, "top_p": 0.5}]
    bench = Bench(ToyModel(scale=1.0), num_slots=len(each))
    asked = [SamplingParams(max_tokens=9, seed=4, **filters) for filters in each]  # type: ignore[arg-type]
    for slot, params in enumerate(asked):
        bench.bind(slot, params, PROMPT)
    logits = bench.model.logits([4, 2])
    slots, positions = torch.arange(num) % len(each), torch.arange(num)
    at = Positions(slots, positions, drafts=DRAFTLESS.expand(num, 0), max_top_k=5, all_top_k=False)
    features = bench.store.features(range(len(each)))
    tokens = sample(logits.repeat(num, 1), at, store=bench.store, features=features, drawn=None)
    for slot, params in enumerate(asked):
        assert_law(tokens[slots == slot], law(logits.tolist(), params, [], []))
