"""The counters agree with what was delivered, and nothing in the engine grows with the number of requests."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest

from runtime.api import MAX_DRAFTS, STEP_KINDS, STEP_PHASES, Delta, Request
from runtime.engine import Engine
from runtime.plan import Batch, Outcome, Row, Sequence, StateLease
from runtime.state.ledger import Freed
from runtime.state.pool import StateTxn
from tests.runtime.engine.harness import (
    QWEN,
    Driver,
    Scripted,
    alone,
    build,
    prompts,
    request,
    texts_of,
)


@pytest.mark.parametrize(
    ("speculative", "lag"), [("none", 0), ("mtp:3", 1), ("right:3", 0), ("right:7", 1), ("right-host:4", 1)]
)
def test_counters_agree_with_deltas(speculative: str, lag: int) -> None:
    requests = [
        request(f"{i}", text, max_tokens=5 + i, num_drafts=(None, 2, 0)[i % 3])
        for i, text in enumerate(prompts(12, lengths=[1, 6, 14], seed=2))
    ]
    expected = alone(requests)
    engine = build(QWEN, speculative=speculative, settle_lag=lag, max_num_seqs=5)
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, expected)
        engine.proposer.right = lambda name, position: (int(name) + position) % 5
    driver = Driver(engine)
    driver.submit(*requests)
    steps = 0
    while engine.has_work:
        serial = driver.stats.step_serial
        driver.step()
        steps += driver.stats.step_serial - serial
    results, stats = driver.results, driver.stats
    emitted = sum(len(result.tokens) for result in results.values())
    assert driver.since("tokens_emitted") == emitted == sum(r.sampling.max_tokens for r in requests)
    assert driver.since("spec_drafted") == sum(result.drafted for result in results.values())
    assert driver.since("spec_accepted") == sum(result.accepted for result in results.values())
    assert driver.since("prompt_tokens_computed") == sum(len(r.prompt) for r in requests)
    assert sum(stats.spec_drafted_at) == stats.spec_drafted
    assert sum(stats.spec_accepted_at) == stats.spec_accepted
    assert len(stats.spec_drafted_at) == len(stats.spec_accepted_at) == MAX_DRAFTS
    assert stats.spec_drafted_at == sorted(stats.spec_drafted_at, reverse=True)
    assert all(a <= d for a, d in zip(stats.spec_accepted_at, stats.spec_drafted_at, strict=True))
    assert stats.spec_drafted_at[0] == stats.spec_verifications
    assert stats.spec_emitted == stats.spec_accepted + stats.spec_verifications
    assert stats.commits_full + stats.commits_partial + stats.commits_bonus_only >= stats.spec_verifications
    assert driver.since("commits") == steps == sum(stats.steps.values())
    assert stats.commits_missing == stats.aborted_steps == stats.draft_failures == stats.non_finite_rows == 0
    assert set(stats.steps) == set(STEP_KINDS) and set(stats.step_seconds) == set(STEP_PHASES)
    if lag == 0:
        assert stats.tokens_discarded == 0
        assert stats.settle_waits == 0
    if speculative == "none":
        assert stats.spec_verifications == 0 and stats.steps["verify"] == 0
    if speculative.startswith("right"):
        assert stats.commits_full and stats.commits_partial and stats.commits_bonus_only


def test_usage_of_the_pools_is_shown() -> None:
    engine = build(QWEN, max_num_seqs=2, num_slots=3, num_blocks=31)
    driver = Driver(engine)
    driver.submit(*(request(f"{i}", text, max_tokens=6) for i, text in enumerate(prompts(5, [4]))))
    driver.step()
    stats = driver.stats
    assert (stats.running, stats.state_slots_used, stats.state_slots_total) == (2, 2, 2)
    assert 2 <= stats.kv_blocks_used <= stats.kv_blocks_total == 30
    assert stats.waiting_seqs + stats.waiting_kv + stats.waiting_state == 3
    driver.finish()


def test_two_thousand_requests_leave_nothing_behind() -> None:
    engine = build(
        QWEN, speculative="ngram:2", settle_lag=1, max_num_seqs=50, max_num_batched_tokens=512, max_model_len=16
    )
    batch = [
        request(f"{i}", text, max_tokens=2, logprobs=1, temperature=1.0, frequency_penalty=0.1, seed=i)
        for i, text in enumerate(prompts(100, lengths=[1, 2, 3, 4], seed=2))
    ]
    sizes = []
    for round_ in range(20):
        driver = Driver(engine)
        driver.submit(*(request(f"{round_}-{r.id}", r.prompt, max_tokens=2, stop_ids=(int(r.id),)) for r in batch))
        driver.step()
        for name in list(driver.results)[::7]:
            driver.cancel(name)
        driver.finish()
        del driver
        gc.collect()
        sizes.append((registries(engine), tracked()))
    warm = sizes[2]
    assert all(size == warm for size in sizes[2:]), [a for a, b in zip(sizes[3:], sizes[2:-1], strict=True) if a != b]


def tracked() -> dict[str, int]:
    """Living objects of the classes that are made for every request or step."""
    kinds = (Request, Delta, Sequence, StateLease, Row, Batch, Outcome, StateTxn, Freed)
    return dict(Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in kinds))


def registries(engine: Engine) -> dict[str, int]:
    """Lengths of all containers that hang from the engine, by path."""
    out: dict[str, int] = {}
    seen: set[int] = set()

    def walk(thing: Any, path: str) -> None:
        if id(thing) in seen or path.count(".") > 6:
            return
        seen.add(id(thing))
        if isinstance(thing, dict | set | list) or type(thing).__name__ == "deque":
            out[path] = len(thing)
        if isinstance(thing, dict):
            for key, value in thing.items():
                walk(value, f"{path}[{key}]")
        elif type(thing).__module__.startswith("runtime."):
            names = list(vars(thing)) if hasattr(thing, "__dict__") else list(getattr(type(thing), "__slots__", ()))
            for name in names:
                walk(getattr(thing, name, None), f"{path}.{name}")

    walk(engine, "engine")
    assert {"engine._bound", "engine.scheduler._live", "engine.states._written"} <= set(out)
    return out
