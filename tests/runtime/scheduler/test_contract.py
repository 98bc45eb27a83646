"""Outcomes that cannot be, and counters."""

from __future__ import annotations

import pytest

from runtime.api import (
    Delta,
    FinishReason,
    StateError,
)
from runtime.plan import Outcome
from tests.support.scheduling import (
    World,
    long_lived,
    sequence_of,
)


def outcome_of(kept: int, emitted: tuple[int, ...], finish: FinishReason | None = None) -> Outcome:
    return Outcome((kept,), (emitted,), (finish,), (None,))


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome((), (), (), ()),
        outcome_of(0, ()),
        outcome_of(1, ()),
        outcome_of(1, (1, 2)),
        outcome_of(5, (1, 2, 3, 4, 5)),
        outcome_of(3, (1, 2, 3)),
    ],
    ids=["rows", "none kept", "none emitted", "too many emitted", "more than fed", "length not seen"],
)
def test_an_outcome_that_cannot_be_changes_nothing(outcome: Outcome) -> None:
    world = World(k=3)
    [name] = long_lived(1)
    world.add(name, 1, 4)
    world.step()
    batch = world.launch()
    assert batch is not None
    before = list(sequence_of(world, name).tokens)
    with pytest.raises(StateError):
        world.scheduler.update(batch, outcome, 1.0)
    assert sequence_of(world, name).tokens == before
    world.settle()
    world.finish()


@pytest.mark.parametrize(
    "outcome",
    [outcome_of(1, ()), outcome_of(2, (5,)), outcome_of(2, (), FinishReason.STOP)],
    ids=["less than fed", "emitted inside the prompt", "finished inside the prompt"],
)
def test_a_chunk_keeps_all_and_says_nothing(outcome: Outcome) -> None:
    world = World(budget=2)
    world.add("a", 6, 3)
    batch = world.launch()
    assert batch is not None
    with pytest.raises(StateError):
        world.scheduler.update(batch, outcome, 1.0)


# --- counters


def test_drafts_are_counted_by_position() -> None:
    world = World(k=3)
    for name in long_lived(5):
        world.add(name, 1, 20)
    told: list[Delta] = []
    while world.scheduler.has_work:
        told += world.step()
    stats = world.stats()
    rows = [row for batch in world.batches for row in batch.rows if row.num_drafts]
    assert stats.spec_verifications == len(rows)
    assert stats.spec_drafted == sum(row.num_drafts for row in rows) == sum(stats.spec_drafted_at)
    assert stats.spec_accepted == sum(stats.spec_accepted_at) > 0
    assert stats.spec_emitted == stats.spec_accepted + stats.spec_verifications
    assert stats.spec_drafted_at == [sum(row.num_drafts > i for row in rows) for i in range(7)]
    assert stats.spec_accepted_at == sorted(stats.spec_accepted_at, reverse=True)
    last = [delta for delta in told if delta.finish is not None]
    assert sum(delta.drafted for delta in last) == stats.spec_drafted
    assert sum(delta.accepted for delta in last) == stats.spec_accepted
    assert stats.prompt_tokens_computed == 5
    assert stats.step_tokens == sum(batch.num_tokens for batch in world.batches)


def test_gauges_show_the_pool_and_the_queue() -> None:
    world = World(num_seqs=1, blocks=10, slots=2)
    for name in long_lived(3):
        world.add(name, 5, 9)
    world.step()
    stats = world.stats()
    assert (stats.running, stats.waiting_seqs, stats.waiting_kv, stats.waiting_state) == (1, 2, 0, 0)
    assert (stats.kv_blocks_total, stats.state_slots_total, stats.state_slots_used) == (10, 2, 1)
    assert stats.kv_blocks_used == world.ledger.used_blocks > 0
    world.finish()
