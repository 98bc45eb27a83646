"""Counters go on over an engine's death, whatever it had counted; gauges do not."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import pytest

from runtime.api import (
    CACHE_LOSSES,
    CACHE_TIERS,
    CHECKPOINT_TRIGGERS,
    DISTRIBUTIONS,
    MAX_DRAFTS,
    MEMORY_KINDS,
    REGISTRIES,
    ROW_KINDS,
    STATE_COPIES,
    STEP_KINDS,
    STEP_PHASES,
    Distribution,
    EngineStats,
)
from server.metrics import TABLE
from server.row import Row
from server.totals import GAUGES, added

KEYS: dict[str, tuple[str, ...]] = {
    "memory_bytes": MEMORY_KINDS,
    "registries": REGISTRIES,
    "steps": STEP_KINDS,
    "step_seconds": STEP_PHASES,
    "commit_rows": ROW_KINDS,
    "state_copies": STATE_COPIES,
    "checkpoints": CACHE_TIERS,
    "checkpoints_total": CACHE_TIERS,
    "checkpoints_written": CHECKPOINT_TRIGGERS,
    "cache_hit_tokens": CACHE_TIERS,
    "cache_lost_tokens": CACHE_LOSSES,
}
SEEDS = range(20)


def snapshot(seed: int) -> EngineStats:
    """Every field has some value; of dictionaries, some keys are missing."""
    source = random.Random(seed)

    def count() -> int:
        return source.choice([0, 1, source.randrange(2**40)])

    def some(names: Iterable[str]) -> list[str]:
        return [name for name in names if source.random() < 0.7]

    made: dict[str, object] = {}
    for field in msgspec.structs.fields(EngineStats):
        if field.name == "distributions":
            made[field.name] = {
                name: Distribution([count() for _ in range(len(DISTRIBUTIONS[name]) + 1)], float(count()))
                for name in some(DISTRIBUTIONS)
            }
        elif field.name in KEYS:
            made[field.name] = {name: count() for name in some(KEYS[field.name])}
        elif field.type in (int, float):
            made[field.name] = field.type(count())
        else:
            made[field.name] = [count() for _ in range(MAX_DRAFTS)]
    return msgspec.convert(made, EngineStats, strict=True)


def values(row: Row, stats: EngineStats) -> dict[tuple[str, ...], list[float]]:
    """What the page shows of a row, histograms as their counts and sum."""
    assert row.source is not None
    return {
        labels: [*read.counts, read.total] if isinstance(read, Distribution) else [read]
        for labels, read in row.source(stats)
    }


ROWS = [row for row in TABLE if row.source is not None]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_counter_falls_when_an_engine_ends_and_another_starts(seed: int) -> None:
    past, now = snapshot(seed), snapshot(seed + 1)
    gone, both = added(past, EngineStats()), added(past, now)
    for row in ROWS:
        if row.kind == "gauge":
            continue
        before, between, after = values(row, past), values(row, gone), values(row, both)
        for labels, numbers in before.items():
            assert between[labels] == numbers, row.name
            assert all(b >= a for a, b in zip(numbers, after[labels], strict=True)), row.name


@pytest.mark.parametrize("seed", SEEDS)
def test_lives_add_up_in_any_order(seed: int) -> None:
    first, second, third = snapshot(seed), snapshot(seed + 1), snapshot(seed + 2)
    assert added(added(first, second), third) == added(first, added(second, third))


@pytest.mark.parametrize("seed", SEEDS)
def test_counters_are_sums(seed: int) -> None:
    past, now = snapshot(seed), snapshot(seed + 1)
    both = added(past, now)
    assert both.tokens_emitted == past.tokens_emitted + now.tokens_emitted
    assert both.spec_accepted_at == [a + b for a, b in zip(past.spec_accepted_at, now.spec_accepted_at, strict=True)]
    assert both.steps.get("verify", 0) == past.steps.get("verify", 0) + now.steps.get("verify", 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_before_changes_nothing(seed: int) -> None:
    now = snapshot(seed)
    assert added(EngineStats(), now) == now


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gauge_is_of_the_engine_that_runs(seed: int) -> None:
    """By the page, so that a field that was forgotten in `GAUGES` is found as soon as a row shows it."""
    past, now = snapshot(seed), snapshot(seed + 1)
    rows = {row.name: row for row in ROWS if row.kind == "gauge"}
    for lasting in ("scheduler_last_step_timestamp_seconds", "state_audit_max_error_ratio"):
        row = rows.pop(lasting)
        assert values(row, added(past, now)) == max(values(row, past), values(row, now), key=lambda read: read[()])
    for row in rows.values():
        assert values(row, added(past, now)) == values(row, now), row.name


def test_every_gauge_is_a_field() -> None:
    assert set(EngineStats.__struct_fields__) >= GAUGES
