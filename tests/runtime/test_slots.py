"""Slots and blocks change hands: nobody reads what the tenant before left, nobody writes where nobody is."""

from __future__ import annotations

import random

import pytest
import torch

from runtime.api import CancelReason, FinishReason
from tests.support.engines import (
    NAN,
    check_idle,
    collect,
    engine_of,
    forget,
    greedy,
    paint,
    pair,
    run,
    submit,
    texts,
    tokens_of,
)
from tests.support.oracle import Watch
from tests.support.undisturbed import prompts, undisturbed

WAYS = [("snapshot", "replay", "decode"), ("replay", "snapshot", "prefill")]
BIG = 1e4


@pytest.mark.parametrize(
    ("name", "way", "speculative", "poison", "count"),
    [
        ("qwen", WAYS[0], "mtp:3", NAN, 200),
        ("granite", WAYS[1], "ngram:3", NAN, 200),
        ("qwen", WAYS[1], "mtp:3", BIG, 60),
        ("granite", WAYS[0], "ngram:3", BIG, 60),
        ("qwen", WAYS[1], "none", BIG, 60),
    ],
)
def test_two_hundred_requests_through_three_slots(
    name: str, way: tuple[str, str, str], speculative: str, poison: float, count: int
) -> None:
    """Prompts shorter than the convolution beside decoding rows; what a lease leaves behind is poisoned."""
    expected = undisturbed(name, 6, 200)
    engine = engine_of(name, speculative=speculative, max_num_seqs=3, poison=poison, num_blocks=60, **pair(*way))
    order = list(prompts(count).items())
    random.Random(1).shuffle(order)
    stories = run(engine, [greedy(i, prompt, 1 + n % 6) for n, (i, prompt) in enumerate(order)])
    for n, (i, _) in enumerate(order):
        assert stories[i].tokens == expected[i][: 1 + n % 6]
    check_idle(engine)
    forget(engine)


@pytest.mark.parametrize("name", ["qwen", "granite"])
def test_prompts_shorter_than_the_convolution(name: str) -> None:
    """They arrive one by one while others decode, speculating or not; STATE after every step."""
    engine = engine_of(name, speculative="ngram:3", num_blocks=60, **pair(*WAYS[0]))
    expected = undisturbed(name)
    watch = Watch(engine, name)
    run(engine, [greedy("warm", tokens_of(1, 20), 5)])
    stories = {}
    for i in ("r0", "r1", "r2", "r3", "r7", "r8", "r9", "r10"):
        stories |= submit(engine, [greedy(i, prompts()[i], 14, num_drafts=0 if i in {"r1", "r8"} else None)])
        for _ in range(2):
            collect(engine, stories)
            watch.look()
    while engine.has_work:
        collect(engine, stories)
        watch.look()
    assert texts(stories) == {i: expected[i][:14] for i in stories}
    watch.check()
    assert watch.num_checked > 100
    forget(engine)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_sixteen_times_the_same(way: tuple[str, str, str]) -> None:
    engine = engine_of("qwen", speculative="mtp:2", max_num_seqs=16, max_num_batched_tokens=33, **pair(*way))
    prompt = tokens_of(50, 21)
    said = texts(run(engine, [greedy(f"s{i}", prompt, 12) for i in range(16)]))
    assert len({tuple(each) for each in said.values()}) == 1
    forget(engine)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("speculative", "way"), [("mtp:3", WAYS[0]), ("ngram:4", WAYS[1])])
def test_aborted_tenants_leave_no_word(speculative: str, way: tuple[str, str, str], lag: int) -> None:
    """CANARY: a third is cancelled at any moment; nobody says a word of another's secret."""
    expected = undisturbed("qwen")
    engine = engine_of("qwen", speculative=speculative, max_num_seqs=3, settle_lag=lag, num_blocks=48, **pair(*way))
    chance = random.Random(lag)
    names = list(prompts())
    stories = submit(engine, [greedy(i, prompts()[i], 10) for i in names])
    doomed = chance.sample(names, len(names) // 3)
    while engine.has_work:
        collect(engine, stories)
        if doomed and chance.random() < 0.4:
            name = doomed.pop()
            engine.cancel(name, CancelReason.CLIENT_GONE, len(stories[name].tokens))
    for name, story in stories.items():
        assert story.tokens == expected[name][: len(story.tokens)]
        assert (len(story.tokens) == 10) == (story.finish is FinishReason.LENGTH)
    assert sum(story.finish is FinishReason.ABORT for story in stories.values()) >= 6
    check_idle(engine)
    forget(engine)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("speculative", "way"), [("mtp:7", WAYS[0]), ("ngram:7", WAYS[1])])
def test_first_and_last_slot_are_nobodys(speculative: str, way: tuple[str, str, str], lag: int) -> None:
    """Bit by bit, for every batch size: no index of -1, no padding that lands in a tenant's place."""
    settings = {"num_slots": 8, "num_blocks": 300, "settle_lag": lag}
    engine = engine_of("qwen", speculative=speculative, **settings, **pair(*way))
    last_slot = engine.states.recurrent.num_slots - 1
    check = paint(engine, [0, last_slot], [0, engine.states.kv.num_blocks - 1])
    expected = undisturbed("qwen")
    for size in range(1, 7):
        names = [f"r{size + i}" for i in range(size)]
        assert texts(run(engine, [greedy(i, prompts()[i], 6) for i in names])) == {i: expected[i][:6] for i in names}
        check()
    forget(engine)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_one_slot_for_everybody(way: tuple[str, str, str]) -> None:
    """Many tenants in a row; extreme tokens leave only finite numbers, and the last is as right as the first."""
    engine = engine_of("qwen", speculative="ngram:4", max_num_seqs=1, poison=None, **pair(*way))
    expected = undisturbed("qwen")
    for round_ in range(30):
        run(engine, [greedy("x", [(299, 3)[round_ % 2]] * (1 + round_ % 9), 5)])
        assert engine.scheduler.ledger.total_slots == 1
    for tensor in (*engine.states.recurrent.conv.values(), *engine.states.recurrent.state.values()):
        assert torch.isfinite(tensor).all()
    for i in ("r0", "r3", "r20"):
        assert run(engine, [greedy(i, prompts()[i], 12)])[i].tokens == expected[i][:12]
    forget(engine)


@pytest.mark.parametrize(
    ("chunk", "name", "way"),
    [
        (1, "qwen", WAYS[1]),
        (3, "granite", WAYS[0]),
        (4, "qwen", WAYS[0]),
        (5, "granite", WAYS[1]),
        (9, "qwen", WAYS[1]),
    ],
)
def test_chunked_prompts(chunk: int, name: str, way: tuple[str, str, str]) -> None:
    """Chunks around a block's size: STATE at the end of each, and the text is that of one piece."""
    prompt = tokens_of(60, 15)
    whole = engine_of(name, **pair(*way))
    said = run(whole, [greedy("a", prompt, 8)])["a"].tokens
    engine = engine_of(name, speculative="ngram:2", max_num_batched_tokens=chunk, **pair(*way))
    watch = Watch(engine, name)
    stories = run(engine, [greedy("a", prompt, 8), greedy("b", prompt[:2], 3), greedy("c", prompt, 8)], watch.look)
    assert stories["a"].tokens == stories["c"].tokens == said
    watch.check()
    assert watch.num_checked > 2 * len(prompt) // chunk
    forget(whole)
    forget(engine)
