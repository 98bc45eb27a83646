"""What the prefix cache gives back is what would have been computed: text, state and KV, wherever it is cut."""

from __future__ import annotations

import functools

import pytest

from runtime.api import CancelReason, Request
from runtime.engine import Engine
from tests.support.engines import (
    PAIRS,
    Story,
    check_idle,
    collect,
    engine_of,
    greedy,
    pair,
    run,
    submit,
    texts,
    tokens_of,
)
from tests.support.oracle import Watch

BLOCK = 4
INTERVAL = 8
DONOR = tokens_of(70, 3 * BLOCK + 1)
SPECULATIVE = ("none", "mtp:3", "ngram:3")
QUICK = [
    ("qwen", "mtp:3", PAIRS[1], 0),
    ("qwen", "mtp:3", PAIRS[2], 1),
    ("qwen", "ngram:3", PAIRS[3], 1),
    ("granite", "none", PAIRS[0], 0),
    ("granite", "ngram:3", PAIRS[1], 1),
]
ALL = [
    (name, speculative, way, lag)
    for name in ("qwen", "granite")
    for speculative in SPECULATIVE
    for way in PAIRS
    for lag in (0, 1)
    if (name, speculative) != ("granite", "mtp:3")
]


def cuts() -> list[Request]:
    """The donor's first n tokens, for every n of three blocks, each with an ending of its own; and all of it."""
    prompts = {f"cut{n}": DONOR[:n] + tokens_of(200 + n, 5) for n in range(1, len(DONOR))}
    return [greedy(name, prompt, 6) for name, prompt in (prompts | {"whole": DONOR}).items()]


@functools.cache
def cold(name: str) -> dict[str, list[int]]:
    """The texts of an engine that has no cache and does not speculate."""
    return texts(run(engine_of(name, prefix_cache=False), cuts()))


def warm(name: str, speculative: str, way: tuple[str, str], lag: int) -> Engine:
    """An engine that has computed the donor."""
    engine = engine_of(
        name, speculative=speculative, settle_lag=lag, checkpoint_interval=INTERVAL, num_checkpoints=64, **pair(*way)
    )
    run(engine, [greedy("donor", DONOR, 8)])
    return engine


def check_cuts(name: str, speculative: str, way: tuple[str, str], lag: int) -> None:
    engine = warm(name, speculative, way, lag)
    watch = Watch(engine, name)
    stories = run(engine, cuts(), watch.look)
    assert texts(stories) == cold(name)
    watch.check()
    assert watch.num_checked > 100
    for n in range(1, len(DONOR)):  # the donor left states at its interval, and at 12: the last boundary it could use
        assert stories[f"cut{n}"].cached >= (n // INTERVAL * INTERVAL if n < 12 else 12), n
    assert stories["whole"].cached == 12
    stats = engine.stats()
    assert stats.cache_hit_tokens["device"] == sum(story.cached for story in stories.values()) > 0
    assert not stats.draft_failures
    check_idle(engine)


@pytest.mark.parametrize(("name", "speculative", "way", "lag"), QUICK)
def test_warm_answers_are_cold_answers(name: str, speculative: str, way: tuple[str, str], lag: int) -> None:
    check_cuts(name, speculative, way, lag)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "speculative", "way", "lag"), ALL)
def test_warm_answers_are_cold_answers_for_all(name: str, speculative: str, way: tuple[str, str], lag: int) -> None:
    check_cuts(name, speculative, way, lag)


def test_another_salt_is_another_text() -> None:
    engine = warm("qwen", "none", PAIRS[1], 0)
    salted = Request(id="s", prompt=DONOR, sampling=greedy("s", DONOR, 6).sampling, cache_salt="tenant")
    assert run(engine, [salted])["s"].cached == 0
    assert run(engine, [salted])["s"].cached == 12
    assert run(engine, [greedy("open", DONOR, 6)])["open"].cached == 12


def test_a_fork_that_was_seen_gets_a_state_and_the_loss_is_counted() -> None:
    engine = engine_of("qwen", checkpoint_interval=64)
    shared = tokens_of(1, 20)
    run(engine, [greedy("a", shared + tokens_of(2, 9), 4)])
    first = run(engine, [greedy("b", shared + tokens_of(3, 9), 4)])["b"]
    assert first.cached == 0
    assert engine.stats().cache_lost_tokens == {"no_checkpoint": 20, "evicted": 0}
    assert run(engine, [greedy("c", shared + tokens_of(4, 9), 4)])["c"].cached == 20
    assert engine.stats().checkpoints_written["fork"] == 1


@pytest.mark.parametrize("speculative", ["none", "mtp:3"])
def test_a_chat_computes_only_what_is_new(speculative: str) -> None:
    """Ten turns, each the text so far and more: at most the new tokens and one interval are computed."""
    engine = engine_of("qwen", speculative=speculative, checkpoint_interval=INTERVAL, max_model_len=256)
    text: tuple[int, ...] = ()
    for turn in range(10):
        new = tokens_of(300 + turn, 7 if turn else 20)
        before = engine.stats().prompt_tokens_computed
        story = run(engine, [greedy(f"t{turn}", text + new, 8)])[f"t{turn}"]
        computed = engine.stats().prompt_tokens_computed - before
        assert computed <= len(new) + INTERVAL
        assert story.cached == len(text + new) - computed
        text = (*text, *new, *story.tokens)
    assert engine.stats().checkpoints_written["end"] > 5


@pytest.mark.parametrize("lag", [0, 1])
def test_nothing_that_was_not_delivered_is_kept(lag: int) -> None:
    """A client that leaves, or a stop string: what was generated beyond `keep` is in no checkpoint."""
    engine = engine_of("qwen", checkpoint_interval=4, settle_lag=lag)
    prompt = tokens_of(9, 13)
    stories = submit(engine, [greedy("a", prompt, 40)])
    while len(stories["a"].tokens) < 21:
        collect(engine, stories)
    said = tuple(stories["a"].tokens)
    engine.cancel("a", CancelReason.STOP_STRING, 6)
    while engine.has_work:
        collect(engine, stories)
    cache = engine.scheduler.ledger.cache
    assert cache is not None
    assert cache.num_checkpoints
    assert all(each.num_tokens <= len(prompt) + 6 for each in cache._checkpoints)
    again = run(engine, [greedy("b", prompt + said[:6] + tokens_of(10, 4), 4)])["b"]
    assert again.cached == 16
    assert again.tokens == cold_text(prompt + said[:6] + tokens_of(10, 4), 4)


def cold_text(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return run(engine_of("qwen", prefix_cache=False), [greedy("x", prompt, max_tokens)])["x"].tokens


def test_a_request_that_failed_leaves_nothing() -> None:
    engine = engine_of("qwen", checkpoint_interval=4)
    stories = submit(engine, [greedy("a", tokens_of(9, 13), 40)])
    for _ in range(8):
        collect(engine, stories)
    cache = engine.scheduler.ledger.cache
    assert cache is not None
    assert cache.num_checkpoints
    forward = engine.runner.forward
    engine.runner.forward = _fails
    collect(engine, stories)
    engine.runner.forward = forward
    assert stories["a"].error
    assert cache.num_checkpoints == 0
    assert cache._blocks.num_cached == 0


def _fails(*_: object) -> None:
    raise RuntimeError("boom")


def test_the_drafter_accepts_as_much_as_without_a_cache() -> None:
    """The embedded model, whose head is good: its KV and hidden state come back with the target's."""
    prompt = tokens_of(5, 60, 200)
    stories: dict[str, Story] = {}
    for name, on in (("cold", False), ("warm", True)):
        engine = engine_of("asset", speculative="mtp:3", prefix_cache=on, checkpoint_interval=16, max_model_len=160)
        if on:
            run(engine, [greedy("donor", (*prompt[:52], *tokens_of(6, 8, 200)), 4)])
        stories[name] = run(engine, [greedy(name, prompt, 40)])[name]
        assert engine.stats().draft_failures == 0
    assert stories["warm"].cached == 48  # the donor left states every 16 tokens
    assert stories["warm"].tokens == stories["cold"].tokens
    assert (stories["warm"].accepted, stories["warm"].drafted) == (stories["cold"].accepted, stories["cold"].drafted)
