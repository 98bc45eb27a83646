"""Preemption keeps the newest state and goes on from it; evicted states go to host memory and come back."""

from __future__ import annotations

import random

import pytest

from runtime.api import CancelReason, FinishReason
from tests.support.engines import PAIRS, check_idle, collect, engine_of, greedy, pair, run, submit, texts, tokens_of

WAYS = [("mtp:3", PAIRS[1], 0), ("mtp:3", PAIRS[2], 1), ("ngram:3", PAIRS[3], 1), ("none", PAIRS[0], 0)]


@pytest.mark.parametrize(("speculative", "way", "lag"), WAYS)
def test_a_request_preempted_at_any_step_says_the_same(speculative: str, way: tuple[str, str], lag: int) -> None:
    """Also between two chunks of its prompt, and with a verification in flight."""
    prompt = tokens_of(3, 19)
    wanted = run(engine_of("qwen", prefix_cache=False), [greedy("x", prompt, 14)])["x"].tokens
    engine = engine_of(
        "qwen", speculative=speculative, settle_lag=lag, checkpoint_interval=4, max_num_batched_tokens=8, **pair(*way)
    )
    for step in range(1, 14, 1 if speculative == "mtp:3" else 3):
        name = f"p{step}"
        salted = greedy(name, prompt, 14)
        stories = submit(engine, [type(salted)(id=name, prompt=prompt, sampling=salted.sampling, cache_salt=name)])
        for _ in range(step):
            collect(engine, stories)
        seq = engine.scheduler._live.get(name)
        if seq is not None and seq.lease is not None:
            engine.scheduler._preempt(seq)
        before = engine.stats().resumed_tokens
        while engine.has_work:
            collect(engine, stories)
        assert stories[name].tokens == wanted, step
        resumed = engine.stats().resumed_tokens - before
        if seq is not None and lag == 0:
            assert resumed >= min(8 * step, 19), step  # at once, nothing is in flight: all that was computed is kept
        elif seq is not None and step > 3:
            assert resumed >= 8, step
    check_idle(engine)


@pytest.mark.parametrize("host_cache_gb", [0.0, 1e-3, 1e-5])
@pytest.mark.parametrize(("speculative", "way", "lag"), WAYS[:2])
def test_everybody_finishes_in_pools_too_small(
    speculative: str, way: tuple[str, str], lag: int, host_cache_gb: float
) -> None:
    """Shared beginnings, few rows, few blocks, aborts: texts of an undisturbed run, books that balance."""
    chance = random.Random(4)
    shared = tokens_of(40, 24)
    prompts = [shared[: chance.randint(0, 24)] + tokens_of(500 + i, chance.randint(1, 6)) for i in range(24)]
    requests = [greedy(f"r{i}", prompt, 3 + i % 7) for i, prompt in enumerate(prompts)]
    wanted = texts(run(engine_of("qwen", prefix_cache=False), requests))
    engine = engine_of(
        "qwen",
        speculative=speculative,
        settle_lag=lag,
        checkpoint_interval=4,
        num_checkpoints=9,
        num_blocks=30,
        max_num_seqs=4,
        max_model_len=64,
        host_cache_gb=host_cache_gb,
        **pair(*way),
    )
    stories = submit(engine, requests)
    steps = 0
    while engine.has_work:
        collect(engine, stories)
        engine.scheduler.ledger.check()
        steps += 1
        alive = [name for name, story in stories.items() if story.finish is None]
        if steps % 5 == 0 and alive and steps < 40:
            gone = chance.choice(alive)
            engine.cancel(gone, CancelReason.CLIENT_GONE, len(stories[gone].tokens))
    for name, story in stories.items():
        assert story.tokens == wanted[name][: len(story.tokens)], name
        assert story.finish is FinishReason.ABORT or story.tokens == wanted[name], name
    stats = engine.stats()
    assert stats.checkpoint_evictions > 0
    assert sum(stats.cache_hit_tokens.values()) > 0
    if host_cache_gb != 1e-5:  # 11 kB: room for one or two
        assert (stats.state_copies["to_host"] > 0) is (host_cache_gb > 0)
    check_idle(engine)
    assert engine.states.copies.num_host_bytes <= host_cache_gb * 2**30


@pytest.mark.parametrize("speculative", ["none", "mtp:3"])
def test_what_the_device_had_no_room_for_comes_back_from_the_host(speculative: str) -> None:
    engine = engine_of(
        "qwen", speculative=speculative, num_checkpoints=1, checkpoint_interval=64, host_cache_gb=1e-3, settle_lag=1
    )
    first, second = tokens_of(1, 30), tokens_of(2, 30)
    wanted = run(engine, [greedy("a", first, 8)])["a"].tokens
    run(engine, [greedy("b", second, 8)])
    again = run(engine, [greedy("c", first, 8)])["c"]
    assert (again.tokens, again.cached) == (wanted, 28)
    stats = engine.stats()
    assert stats.cache_hit_tokens == {"device": 0, "host": 28}
    assert stats.state_copies["from_host"] == 1
    check_idle(engine)
