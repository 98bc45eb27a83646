"""The counters agree with what was delivered, and nothing in the engine grows with the number of requests."""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from safetensors import safe_open

from runtime.api import (
    DISTRIBUTIONS,
    MAX_DRAFTS,
    MEMORY_KINDS,
    ROW_KINDS,
    STEP_KINDS,
    STEP_PHASES,
    Delta,
    Distribution,
    Request,
)
from runtime.engine import Engine
from runtime.plan import Batch, Outcome, Row, Sequence, StateLease
from runtime.scheduler import Scheduler
from runtime.speculation.mtp import MtpProposer
from runtime.state.moves import Freed
from runtime.state.pool import StateTxn
from tests.runtime.engine.harness import (
    QWEN,
    Driver,
    Scripted,
    alone,
    build,
    directory,
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
    assert (stats.waiting_seqs, stats.waiting_kv, stats.waiting_state, stats.waiting_deferred) == (3, 0, 0, 0)
    driver.finish()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_num_seqs": 1}, "waiting_seqs"),
        ({"num_slots": 2}, "waiting_state"),
        ({"num_blocks": 12, "max_model_len": 36}, "waiting_kv"),
        ({"max_num_batched_tokens": 16}, "waiting_deferred"),
    ],
)
def test_it_is_said_what_requests_wait_for(limits: dict[str, int], reason: str) -> None:
    """Only those that hold nothing wait: a prompt that is computed in chunks runs."""
    driver = Driver(build(QWEN, **limits))
    driver.submit(*(request(f"{i}", text, max_tokens=10) for i, text in enumerate(prompts(3, [20]))))
    driver.step()
    waiting = {name: getattr(driver.stats, name) for name in driver.stats.__struct_fields__ if "waiting" in name}
    assert waiting.pop("waiting_tokens") > 0
    assert waiting.pop(reason) == 2
    assert not any(waiting.values())
    assert driver.stats.running == 1
    driver.finish()
    assert driver.stats.running + sum(getattr(driver.stats, name) for name in (*waiting, reason)) == 0


@pytest.mark.parametrize(
    ("speculative", "lag", "strategy"),
    [("none", 0, "replay"), ("mtp:3", 1, "snapshot"), ("right:1", 0, "replay"), ("right-host:4", 1, "replay")],
)
def test_distributions_are_of_what_was_planned_and_judged(speculative: str, lag: int, strategy: str) -> None:
    engine = build(QWEN, speculative=speculative, settle_lag=lag, max_num_seqs=3, decode_backend=strategy)
    start = engine.stats()
    batches: list[Batch] = []
    lengths: list[int] = []

    def schedule(now: float) -> Batch | None:
        batch = Scheduler.schedule(engine.scheduler, now)
        batches.extend([batch] if batch is not None else [])
        return batch

    def update(batch: Batch, outcome: Outcome, now: float) -> list[Delta]:
        drafted = [kept - 1 for row, kept in zip(batch.rows, outcome.kept, strict=True) if row.num_drafts and row.live]
        lengths.extend(drafted)
        return Scheduler.update(engine.scheduler, batch, outcome, now)

    engine.scheduler.schedule, engine.scheduler.update = schedule, update  # type: ignore[method-assign]
    driver = Driver(engine)
    driver.submit(*(request(f"{i}", text, max_tokens=6) for i, text in enumerate(prompts(5, lengths=[1, 9]))))
    driver.finish()
    stats = driver.stats

    def seen(name: str) -> Distribution:
        return stats.distributions[name]

    assert set(stats.distributions) == set(DISTRIBUTIONS)
    assert counted("step_tokens", [batch.num_tokens for batch in batches]) == seen("step_tokens")
    assert counted("batch_size", [len(batch.rows) for batch in batches]) == seen("batch_size")
    assert counted("accepted_length", lengths) == seen("accepted_length")
    verifying = sum(any(row.num_drafts for row in batch.rows) for batch in batches)
    speculating = sum(any(row.seq.num_drafts for row in batch.rows) for batch in batches)
    for name, count in (
        ("step_seconds", len(batches)),
        ("commit_seconds", len(batches)),
        ("verify_seconds", verifying),
        ("draft_seconds", speculating),
    ):
        assert sum(seen(name).counts) == count, name
        assert (seen(name).total > 0) == (count > 0)
    assert seen("commit_seconds").total == pytest.approx(stats.step_seconds["commit"])
    rows = Counter(row.kind.value for batch in batches for row in batch.rows)
    assert {kind: stats.commit_rows[kind] - start.commit_rows[kind] for kind in ROW_KINDS} == {
        kind: rows[kind] for kind in ROW_KINDS
    }
    folds = 0 if strategy == "snapshot" else rows["decode"] + rows["verify"]
    assert stats.state_copies["fold"] - start.state_copies["fold"] == folds
    assert stats.state_copies["commit"] - start.state_copies["commit"] == rows.total() - folds


def counted(name: str, values: list[int]) -> Distribution:
    """Bucket by bucket, from the definition."""
    bounds = [float("-inf"), *DISTRIBUTIONS[name], float("inf")]
    counts = [sum(low < value <= high for value in values) for low, high in itertools.pairwise(bounds)]
    return Distribution(counts, float(sum(values)))


@pytest.mark.parametrize("chunk", [4, 128])
def test_where_the_time_went_is_said_with_the_first_tokens_and_with_the_last(chunk: int) -> None:
    engine = build(QWEN, max_num_seqs=1, max_num_batched_tokens=chunk)
    texts = prompts(2, [9])
    for name, text in zip("ab", texts, strict=True):
        engine.submit(request(name, text, max_tokens=4, num_drafts=0))
    deltas: dict[str, list[Delta]] = {"a": [], "b": []}
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    for of_one in deltas.values():
        first, *between, last = (delta.timing for delta in of_one)
        assert first is not None and last is not None
        assert between == [None, None]
        assert first.decode == 0 < last.decode
        assert (first.queued, first.prefill) == (last.queued, last.prefill)
    first_of_b, last_of_a = deltas["b"][0].timing, deltas["a"][-1].timing
    assert first_of_b is not None and last_of_a is not None
    assert first_of_b.queued > last_of_a.decode  # it waited for all of the other


@pytest.mark.parametrize("strategy", ["snapshot", "replay"])
def test_memory_is_that_of_the_tensors(strategy: str) -> None:
    """Counted by walking through what holds them, and by the checkpoint's own shapes."""
    engine = build(QWEN, speculative="mtp:3", num_blocks=40, num_slots=5, decode_backend=strategy)
    driver = Driver(engine)
    driver.submit(*(request(f"{i}", (1, 2, 3), max_tokens=9) for i in range(3)))
    driver.finish()
    held, states, drafter = driver.stats.memory_bytes, engine.states, engine.proposer
    assert set(held) == set(MEMORY_KINDS)
    assert held["kv"] == storages(states.kv)
    assert held["state"] == 5 * driver.stats.state_slot_bytes
    assert held["state"] + held["checkpoints"] == storages(states.recurrent)
    candidates = storages(states.backend) - held["kv"] - held["state"] - held["checkpoints"]
    assert 0.9 * candidates <= held["candidates"] <= candidates  # small index tensors are not counted
    assert isinstance(drafter, MtpProposer)
    assert held["draft"] == storages([drafter.paged_stores(), drafter.slot_stores()])
    with safe_open(next(directory(QWEN).glob("*.safetensors")), "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in list(file.keys())]
    published = sum(4 * math.prod(shape) for shape in shapes)
    assert published <= held["weights"] <= 1.01 * published  # fused parameters may be a little larger


def storages(root: Any) -> int:
    """Bytes of all tensors that hang from an object, each memory once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    rest = [root]
    while rest:
        thing = rest.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            rest += thing.values()
        elif isinstance(thing, list | tuple | set):
            rest += thing
        elif type(thing).__module__.startswith("runtime."):
            names = list(getattr(thing, "__dict__", ())) or getattr(type(thing), "__slots__", ())
            rest += [getattr(thing, name, None) for name in names]
    return sum(found.values())


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
