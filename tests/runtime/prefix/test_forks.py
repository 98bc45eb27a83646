"""Siblings of one request: the prompt is computed once, and from there everybody has a state of their own."""

from __future__ import annotations

import pytest

from tests.support.engines import Story, check_idle, collect, engine_of, greedy, run, submit, tokens_of

COUNT = 4


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("speculative", ["none", "mtp:3"])
def test_siblings_compute_their_prompt_once(speculative: str, lag: int) -> None:
    prompt = tokens_of(8, 22)
    alone = engine_of("qwen", prefix_cache=False)
    requests = [greedy(f"s{i}", prompt, 8, temperature=0.0 if i < 2 else 1.0, seed=i) for i in range(COUNT)]
    wanted = {request.id: run(alone, [request])[request.id].tokens for request in requests}
    assert wanted["s0"] == wanted["s1"] != wanted["s2"]
    engine = engine_of("qwen", speculative=speculative, settle_lag=lag, max_num_batched_tokens=16)
    stories: dict[str, Story] = submit(engine, requests)
    most = 0
    while engine.has_work:
        collect(engine, stories)
        ledger = engine.scheduler.ledger
        most = max(most, ledger.used_slots)
        ledger.check()
    assert {name: story.tokens for name, story in stories.items()} == wanted
    assert most == COUNT  # each has a slot of its own
    assert engine.stats().prompt_tokens_computed == 22 + (COUNT - 1) * 2
    assert [story.cached for story in stories.values()] == [0, 20, 20, 20]
    check_idle(engine)


def test_siblings_do_not_wait_for_one_that_left() -> None:
    prompt = tokens_of(8, 40)
    engine = engine_of("qwen", max_num_batched_tokens=8)
    stories = submit(engine, [greedy(f"s{i}", prompt, 4) for i in range(3)])
    collect(engine, stories)
    assert engine.stats().running == 1
    engine.scheduler.cancel("s0", keep=0, now=0.0)
    while engine.has_work:
        collect(engine, stories)
    assert stories["s1"].tokens == stories["s2"].tokens
    assert len(stories["s1"].tokens) == 4


def test_without_a_row_for_the_state_siblings_still_finish() -> None:
    """The only row is claimed or read by others again and again: then the prompt is computed more than once."""
    engine = engine_of("qwen", num_checkpoints=1, max_num_batched_tokens=8, checkpoint_interval=8)
    prompt = tokens_of(8, 30)
    stories = run(engine, [greedy(f"s{i}", prompt if i % 2 else prompt[:21], 5) for i in range(8)])
    assert len({tuple(story.tokens) for story in stories.values()}) == 2
    check_idle(engine)
