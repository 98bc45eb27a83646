"""Requests taken back at any moment: the others never notice, and everything they held comes back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.api import CancelReason, FinishReason, Request
from tests.runtime.engine.harness import (
    QWEN,
    Driver,
    Scripted,
    alone,
    assert_empty,
    build,
    prompts,
    request,
    shared,
    texts_of,
)

WAYS = [("none", 1), ("ngram:4", 1), ("mtp:3", 0), ("right:3", 1)]


@pytest.mark.parametrize(("speculative", "lag"), WAYS)
def test_cancelled_after_any_number_of_steps(speculative: str, lag: int) -> None:
    """Waiting, inside the prompt, decoding, with a step in flight, and when it is over already."""
    victim = request("victim", prompts(1, [13], seed=2)[0], max_tokens=8, temperature=1.0)
    mates = [request(f"{i}", text, max_tokens=10, seed=i) for i, text in enumerate(prompts(3, [1, 7, 4], seed=5))]
    expected = alone([victim, *mates])
    engine = build(QWEN, speculative=speculative, settle_lag=lag, max_num_batched_tokens=9, max_num_seqs=3)
    finishes = set()
    for moment in (*range(9), 12, 30):
        driver = Driver(engine)
        driver.submit(*mates[:2], victim, mates[2])
        for _ in range(moment):
            driver.step()
        driver.cancel("victim")
        driver.finish()
        result = driver.results["victim"]
        finishes.add(result.finish)
        assert result.tokens == expected["victim"].tokens[: len(result.tokens)]
        for mate in mates:
            assert driver.results[mate.id].tokens == expected[mate.id].tokens
        assert_empty(engine)
    assert finishes == {FinishReason.ABORT, FinishReason.LENGTH}


def test_an_abort_says_so_once_and_counts_what_was_not_delivered() -> None:
    engine = shared(QWEN, "none", 0)
    driver = Driver(engine)
    driver.submit(request("a", (5, 6, 7), max_tokens=20))
    for _ in range(6):
        driver.step()
    assert len(driver.results["a"].tokens) == 6
    driver.cancel("a", keep=4)
    driver.cancel("a", keep=0)
    assert engine.has_work
    driver.finish()
    assert driver.results["a"].finish is FinishReason.ABORT
    assert driver.since("tokens_discarded") == 2
    driver.submit(request("a", (5, 6, 7), max_tokens=2))
    assert driver.finish()["a"].finish is FinishReason.LENGTH


def test_unknown_ids_and_parts_of_ids_are_ignored() -> None:
    engine = shared(QWEN, "none", 0)
    driver = Driver(engine)
    made = request("request-12", (5, 6, 7))
    expected = alone([made])
    driver.submit(made)
    for name in ("", "request", "request-1", "request-123", "REQUEST-12", "request-12 ", "*"):
        for reason in CancelReason:
            engine.cancel(name, reason, 0)
    assert driver.finish()["request-12"].tokens == expected["request-12"].tokens
    engine.cancel("request-12", CancelReason.CLIENT_GONE, 0)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("speculative", "lag", "poison"),
    [
        ("none", 0, float("nan")),
        ("ngram:4", 1, float("nan")),
        ("mtp:3", 1, float("nan")),
        ("right:3", 1, float("nan")),
        ("mtp:3", 1, 1e4),
    ],
)
def test_a_third_gone_and_every_survivor_is_itself(speculative: str, lag: int, poison: float) -> None:
    """CANARY: every prompt carries tokens of its own, and every output is what that prompt alone would get."""
    dice = random.Random(lag + len(speculative))
    requests = canaries(120)
    expected = alone(requests)
    engine = build(
        QWEN,
        poison,
        speculative=speculative,
        settle_lag=lag,
        num_blocks=40,
        max_model_len=40,
        max_num_seqs=7,
        num_slots=8,
    )
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, expected)
        engine.proposer.right = lambda name, position: (int(name) + position) % 5
    driver, left = Driver(engine), list(requests)
    gone: set[str] = set()
    patience = {r.id: dice.randrange(25) for r in requests if dice.random() < 0.4}
    while left or engine.has_work:
        for _ in range(min(len(left), dice.choice((0, 1, 2, 5)))):
            driver.submit(left.pop(0))
        for name, result in list(driver.results.items()):
            if name not in patience or name in gone or result.finish is not None:
                continue
            patience[name] -= 1
            if patience[name] < 0:
                gone.add(name)
                driver.cancel(name)
        driver.step()
    survivors = [r for r in requests if r.id not in gone]
    assert len(gone) > 25 and len(survivors) > 60
    for made in survivors:
        assert driver.results[made.id].tokens == expected[made.id].tokens, made.id
    for name in gone:
        assert driver.results[name].tokens == expected[name].tokens[: len(driver.results[name].tokens)]
    assert driver.since("non_finite_rows") == 0


def canaries(count: int) -> list[Request]:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"repetition_penalty": 1.3}, {"logit_bias": {9: 3.0}}]
    return [
        request(f"{i}", text, max_tokens=6 + i % 7, seed=i, **kinds[i % 4])
        for i, text in enumerate(prompts(count, lengths=[1, 2, 3, 4, 8, 20], seed=77))
    ]
