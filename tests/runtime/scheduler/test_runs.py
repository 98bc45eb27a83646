"""Whole runs: everybody ends with exactly their own text."""

from __future__ import annotations

import pytest

from runtime.api import (
    Accepted,
)
from tests.support.scheduling import (
    DRAFTS,
    HOSTS,
    LAGS,
    World,
    expected,
    long_lived,
)


@LAGS
@HOSTS
@DRAFTS
@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_everybody_gets_their_own_text(lag: int, host: bool, k: int, budget: int) -> None:
    world = World(lag=lag, host=host, k=k, budget=budget)
    for i, (length, max_tokens) in enumerate([(1, 1), (1, 9), (7, 1), (20, 30), (3, 16), (8, 2), (63, 5), (1, 100)]):
        assert isinstance(world.add(f"r{i}", min(length, world.scheduler.max_len - 1), max_tokens), Accepted)
    world.finish()


@LAGS
@HOSTS
@DRAFTS
def test_a_tiny_pool_serves_many_by_preempting(lag: int, host: bool, k: int) -> None:
    world = World(lag=lag, host=host, k=k, blocks=10 if k < 7 else 16, slots=3, max_len=32, num_seqs=3)
    for i in range(50):
        assert isinstance(world.add(f"r{i}", 1 + i % 12, 1 + i % 17), Accepted)
    world.finish()
    assert world.stats().preemptions_state == 0


@LAGS
@HOSTS
@DRAFTS
def test_preemption_happens_and_leaves_no_mark(lag: int, host: bool, k: int) -> None:
    blocks = {0: 16, 1: 17, 7: 28}[k]  # room for two at their start, not at their end
    world = World(lag=lag, host=host, k=k, blocks=blocks, block_size=2, max_len=30, slots=4)
    names = long_lived(4, start=2, least=28)
    for name in names:
        world.add(name, 2, 100)
    world.finish()
    assert [len(world.asked[name].tokens) for name in names] == [28] * 4
    assert world.stats().preemptions_kv > 0


@LAGS
def test_two_that_need_most_of_the_pool_both_finish(lag: int) -> None:
    world = World(lag=lag, blocks=10, block_size=4, max_len=40)
    world.add("a", 24)
    world.add("b", 24)
    world.step()
    assert (world.stats().running, world.stats().waiting_kv) == (1, 1)
    world.finish()


@LAGS
def test_one_slot_serves_many(lag: int) -> None:
    world = World(lag=lag, slots=1, blocks=8, max_len=32)
    for i in range(20):
        world.add(f"r{i}", 1 + i, 3)
    world.step()
    assert (world.stats().running, world.stats().waiting_state) == (1, 19)
    world.finish()


@LAGS
@HOSTS
@DRAFTS
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 9, 17])
def test_exactly_max_tokens_are_delivered(lag: int, host: bool, k: int, max_tokens: int) -> None:
    names = [f"m{i}" for i in range(200) if len(expected(f"m{i}", 3, 3 + max_tokens)[0]) == max_tokens][:3]
    world = World(lag=lag, host=host, k=k)
    for name in names:
        world.add(name, 3, max_tokens)
    world.finish()
    assert [len(world.asked[name].tokens) for name in names] == [max_tokens] * 3
