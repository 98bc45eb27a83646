"""Seeded text and log-probabilities do not depend on speculation, batch mates, settle lag or preemption."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.api import Request
from tests.runtime.engine.harness import (
    GRANITE,
    QWEN,
    WAYS,
    Driver,
    Scripted,
    alone,
    prompts,
    ref,
    request,
    run,
    shared,
    texts_of,
)

FILTERS = [
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0, "top_p": 0.95},
    {"logit_bias": {10: 4.0, 11: 4.0, 12: -100.0}},
    {"logit_bias": {20: 5.0}, "repetition_penalty": 0.8, "frequency_penalty": 2.0, "top_k": 40, "min_p": 0.02},
    {"min_tokens": 6, "ignore_eos": False, "logit_bias": {2: 6.0}},
]


def mixture(drafts: tuple[int | None, ...] = (None,)) -> list[Request]:
    """Every filter at every temperature, each with a seed of its own, and greedy ones with penalties."""
    out = []
    kinds = [*itertools.product((0.5, 1.0, 1.5), FILTERS), *((0.0, f) for f in FILTERS)]
    texts = prompts(len(kinds), lengths=[1, 3, 6, 11], seed=3)
    for i, ((temperature, extra), prompt) in enumerate(zip(kinds, texts, strict=True)):
        settings = {"temperature": temperature, "seed": 1000 + i, **extra}
        out.append(request(f"{i}", prompt, max_tokens=10, num_drafts=drafts[i % len(drafts)], **settings))
    return out


@pytest.mark.parametrize("model", [QWEN, GRANITE])
def test_seeded_text_is_the_same_with_and_without_speculation(model: str) -> None:
    requests = mixture()
    expected = alone(requests, model)
    for speculative, lag in WAYS:
        if model == GRANITE and speculative.startswith("mtp"):
            continue
        check(requests, expected, model, speculative, lag)


@pytest.mark.parametrize("lag", [0, 1])
def test_each_request_may_draft_as_it_likes(lag: int) -> None:
    requests = mixture(drafts=(0, 1, 2, 7, None))
    expected = alone(requests)
    for speculative in ("right:7", "right-host:7", "mtp:7", "ngram:7"):
        check(requests, expected, QWEN, speculative, lag)


def check(requests: list[Request], expected: dict, model: str, speculative: str, lag: int) -> None:
    engine = shared(model, speculative, lag, max_num_seqs=64, max_num_batched_tokens=640)
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, expected)
        engine.proposer.right = lambda name, position: (int(name) + position) % 9
    driver = Driver(engine)
    results = driver.run(requests)
    for made in requests:
        found, wanted = results[made.id], expected[made.id]
        assert found.tokens == wanted.tokens, (speculative, lag, made)
        assert found.finish is wanted.finish
    if speculative.startswith("right"):
        assert driver.since("commits_full") and driver.since("commits_partial") and driver.since("commits_bonus_only")


def test_one_seed_one_text_and_other_seeds_other_texts() -> None:
    (prompt,) = prompts(1, [5])
    engine = shared(QWEN, "mtp:3", 0)
    texts = []
    for seeds in ([1, 1, 2, 3], [3, 2**63, 1, -1]):
        made = [request(f"{i}", prompt, temperature=1.0, seed=seed) for i, seed in enumerate(seeds)]
        texts += [(seed, tuple(r.tokens)) for seed, r in zip(seeds, run(engine, made).values(), strict=True)]
    assert len({text for _, text in texts}) == len({seed for seed, _ in texts})


def test_a_bias_moves_every_verified_token() -> None:
    """What would have been said is forbidden, one more token each time, while the drafts still say it."""
    (prompt,) = prompts(1, [6], seed=9)
    plain = alone([request("p", prompt)])["p"].tokens
    made = [request(f"{n}", prompt, logit_bias=dict.fromkeys(plain[:n], -100.0)) for n in range(1, len(plain))]
    expected = alone(made)
    engine = shared(QWEN, "right:3", 0)
    engine.proposer.texts = {r.id: [*prompt, *plain] for r in made}  # type: ignore[union-attr]
    results = run(engine, made)
    for i, r in enumerate(made, start=1):
        assert results[r.id].tokens == expected[r.id].tokens
        assert not set(results[r.id].tokens) & set(plain[:i])


@pytest.mark.parametrize(
    ("speculative", "lag"), [("none", 1), ("ngram:4", 0), ("mtp:3", 1), ("right:3", 0), ("right-host:4", 1)]
)
def test_logprobs_are_the_models_own_with_and_without_speculation(speculative: str, lag: int) -> None:
    made = [
        request(f"{n}-{t}", prompt, logprobs=n, temperature=t, seed=n, max_tokens=9, top_k=30, frequency_penalty=0.3)
        for (n, prompt), t in itertools.product(zip((0, 1, 2, 5, 20), prompts(5, [1, 4, 9]), strict=True), (0.0, 1.2))
    ]
    made.append(request("silent", (5, 6, 7), max_tokens=9))
    made.append(request("odd", (5, 6, 7), max_tokens=9, logprobs=3, num_drafts=0))
    expected = alone(made)
    engine = shared(QWEN, speculative, lag, max_num_seqs=16)
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(made, expected)
        engine.proposer.right = lambda _name, position: position % 4
    results = run(engine, made)
    assert results["silent"].logprobs == []
    for r in made:
        found, wanted = results[r.id], expected[r.id]
        assert found.tokens == wanted.tokens
        if r.sampling.logprobs is None:
            continue
        assert len(found.logprobs) == len(found.tokens) == 9
        truth = torch.log_softmax(ref(QWEN).logits([*r.prompt, *found.tokens[:-1]])[-9:], dim=-1)
        for entry, other, token, row in zip(found.logprobs, wanted.logprobs, found.tokens, truth, strict=True):
            assert len(entry.top) == r.sampling.logprobs
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            assert values == pytest.approx([value for _, value in other.top], abs=1e-4)
            assert values == pytest.approx(row.topk(len(values)).values.tolist(), abs=1e-3)
            for token_id, value in entry.top:
                assert value == pytest.approx(float(row[token_id]), abs=1e-3)
