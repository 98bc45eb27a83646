"""Pools too small for what is asked of them: everybody finishes, with the text of an undisturbed run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.api import FinishReason, Request
from runtime.engine import Engine
from tests.runtime.engine.harness import (
    GRANITE,
    QWEN,
    Driver,
    Result,
    Scripted,
    alone,
    assert_empty,
    build,
    prompts,
    request,
    texts_of,
)

WAYS = [("none", 0), ("mtp:3", 1), ("right:3", 0), ("right:3", 1), ("right-host:4", 1)]


def crowd(count: int, max_tokens: tuple[int, ...] = (3, 9, 17), seed: int = 1) -> list[Request]:
    """Requests of all kinds of sampling, whose state includes counts, seeds and log-probabilities."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "frequency_penalty": 0.8, "presence_penalty": 0.3},
        {"repetition_penalty": 1.4, "logprobs": 2},
    ]
    return [
        request(f"{i}", prompt, max_tokens=max_tokens[i % len(max_tokens)], seed=i, **kinds[i % len(kinds)])
        for i, prompt in enumerate(prompts(count, lengths=[1, 3, 6, 11], seed=seed))
    ]


def teach(engine: Engine, requests: list[Request], expected: dict[str, Result]) -> None:
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, expected)
        engine.proposer.right = lambda name, position: (int(name) + position) % 5


def assert_same(results: dict[str, Result], expected: dict[str, Result]) -> None:
    for name, wanted in expected.items():
        assert (results[name].tokens, results[name].finish) == (wanted.tokens, wanted.finish), name
        assert len(results[name].logprobs) == len(wanted.logprobs)


@pytest.mark.parametrize(("speculative", "lag"), WAYS)
@pytest.mark.parametrize("model", [QWEN, GRANITE])
def test_preempted_requests_say_what_undisturbed_ones_say(model: str, speculative: str, lag: int) -> None:
    if model == GRANITE and speculative.startswith("mtp"):
        pytest.skip("this family has no head")
    requests = crowd(12)
    expected = alone(requests, model)
    preempted = 0
    for num_blocks in (10, 13, 17):
        engine = build(
            model, speculative=speculative, settle_lag=lag, num_blocks=num_blocks, max_model_len=28, max_num_seqs=6
        )
        teach(engine, requests, expected)
        driver = Driver(engine)
        assert_same(driver.run(requests), expected)
        preempted += driver.since("preemptions_kv")
    assert preempted >= 3


@pytest.mark.parametrize(("speculative", "lag"), WAYS)
def test_preempted_at_any_moment_and_again(speculative: str, lag: int) -> None:
    """In the prompt, after every token, with a step in flight, before its first step after the last preemption."""
    older = request("0", prompts(1, [3])[0], max_tokens=12)
    younger = request(
        "1", prompts(1, [11], 4)[0], max_tokens=9, seed=3, temperature=1.0, presence_penalty=1.0, logprobs=1
    )
    expected = alone([older, younger])
    engine = build(QWEN, speculative=speculative, settle_lag=lag, max_num_batched_tokens=8)
    teach(engine, [older, younger], expected)
    scheduler, preempted = engine.scheduler, 0
    for again in (1, 100):
        for moment in range(1, 12):
            driver = Driver(engine)
            driver.submit(older, younger)
            steps = 0
            while engine.has_work:
                driver.step()
                steps += 1
                if steps in (moment, moment + again) and len(scheduler._running) == 2:
                    scheduler._preempt(scheduler._running[1])
            assert_same(driver.results, expected)
            assert_empty(engine)
            preempted += driver.since("preemptions_kv")
    assert preempted >= 5


@pytest.mark.parametrize(("speculative", "lag"), [("none", 0), ("mtp:3", 1), ("ngram:4", 1)])
def test_two_slots_serve_fifty_requests(speculative: str, lag: int) -> None:
    requests = crowd(50, max_tokens=(2, 3, 5))
    expected = alone(requests)
    engine = build(QWEN, speculative=speculative, settle_lag=lag, num_slots=3, max_num_seqs=16, max_model_len=32)
    driver = Driver(engine)
    driver.submit(*requests)
    waited = 0
    while engine.has_work:
        driver.step()
        assert driver.stats.state_slots_used <= driver.stats.state_slots_total == 2
        waited = max(waited, driver.stats.waiting_state)
    assert_same(driver.results, expected)
    assert waited >= 45


@pytest.mark.parametrize(("speculative", "lag"), WAYS)
def test_two_requests_that_each_need_most_of_the_pool_both_finish(speculative: str, lag: int) -> None:
    texts = prompts(2, [20], seed=8)
    requests = [request(f"{i}", text, max_tokens=24, temperature=0.8, seed=i) for i, text in enumerate(texts)]
    expected = alone(requests)
    engine = build(QWEN, speculative=speculative, settle_lag=lag, num_blocks=18, max_model_len=48)
    assert engine.states.ledger.blocks_for(44) > 0.6 * engine.states.ledger.total_blocks
    teach(engine, requests, expected)
    driver = Driver(engine)
    driver.submit(*requests)
    steps = 0
    while engine.has_work:
        driver.step()
        steps += 1
        assert steps < 200
    assert_same(driver.results, expected)


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_longer_than_a_steps_budget_are_fed_in_chunks_beside_the_others(lag: int) -> None:
    requests = [
        request(f"{i}", text, max_tokens=6, temperature=1.0, seed=i)
        for i, text in enumerate(prompts(8, lengths=[1, 40, 2, 33, 7], seed=12))
    ]
    expected = alone(requests)
    for budget in (1, 2, 5, 16):
        for speculative in ("none", "right:3") if budget < 16 else ("mtp:3",):
            engine = build(QWEN, speculative=speculative, settle_lag=lag, max_num_batched_tokens=budget, max_num_seqs=5)
            teach(engine, requests, expected)
            assert_same(Driver(engine).run(requests), expected)
            assert_empty(engine)


@pytest.mark.parametrize("lag", [0, 1])
def test_arrivals_at_any_moment(lag: int) -> None:
    """Requests come while others are at any point, into a pool that is always short."""
    dice = random.Random(3)
    requests = crowd(40)
    expected = alone(requests)
    engine = build(QWEN, speculative="right:3", settle_lag=lag, num_blocks=20, max_model_len=28, max_num_seqs=5)
    teach(engine, requests, expected)
    driver, left = Driver(engine), list(requests)
    while left or engine.has_work:
        for _ in range(min(len(left), dice.choice((0, 0, 1, 1, 4)))):
            driver.submit(left.pop(0))
        driver.step()
    assert_same(driver.results, expected)
    assert all(result.finish is FinishReason.LENGTH for result in driver.results.values())
    assert driver.since("preemptions_kv") > 0
