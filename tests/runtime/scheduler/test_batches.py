"""What a batch holds: rows, budgets, room."""

from __future__ import annotations

import pytest

from runtime.api import (
    FinishReason,
)
from runtime.plan import Batch, RowKind
from tests.support.scheduling import (
    HOSTS,
    LAGS,
    ORDER,
    World,
    long_lived,
    prompt_of,
    shape,
)


def test_a_long_prompt_does_not_stall_the_others() -> None:
    world = World(budget=4, max_len=60)
    a, b = long_lived(2)
    world.add(a, 1, 20)
    world.step()
    world.add(b, 20, 2)
    for done in range(0, 20, 3):
        num_fed = min(3, 20 - done)
        assert shape(world.launch()) == [(b, RowKind.PREFILL, num_fed), (a, RowKind.DECODE, 1)]
        world.settle()
    world.finish()


@pytest.mark.parametrize("budget", [1, 2, 7, 19, 20, 21])
def test_chunks_cover_the_prompt_once(budget: int) -> None:
    world = World(budget=budget)
    [name] = long_lived(1, start=20)
    world.add(name, 20, 1)
    world.finish()
    rows = [row for batch in world.batches for row in batch.rows]
    assert [row.num_fed for row in rows] == [min(budget, 20 - start) for start in range(0, 20, budget)]
    assert [row.emits for row in rows] == [False] * (len(rows) - 1) + [True]


def test_rows_of_one_kind_are_neighbours() -> None:
    world = World(k=3, k_max=7)
    a, b, c = long_lived(3)
    world.add(a, 1, 20)
    world.add(b, 1, 20, num_drafts=0)
    world.step()
    world.add(c, 5, 20)
    batch = world.launch()
    assert [row.kind for row in batch.rows] == ORDER if batch else False
    world.settle()
    world.finish()


@pytest.mark.parametrize(("asked", "given"), [(None, 3), (0, 0), (1, 1), (7, 4), (100, 4)])
def test_draft_length_is_per_request(asked: int | None, given: int) -> None:
    world = World(k=3, k_max=4)
    [name] = long_lived(1)
    world.add(name, 1, 20, num_drafts=asked)
    world.step()
    batch = world.launch()
    assert batch is not None
    assert batch.rows[0].seq.num_drafts == given
    assert batch.rows[0].num_drafts == given
    assert batch.rows[0].kind is (RowKind.VERIFY if given else RowKind.DECODE)
    world.settle()
    world.finish()


def test_a_budget_smaller_than_the_drafts_bounds_them() -> None:
    world = World(k=7, budget=3)
    world.add("a", 9, 20)
    world.finish()
    assert max(row.num_drafts for batch in world.batches for row in batch.rows) <= 2


def test_a_request_that_speculates_verifies_also_without_drafts() -> None:
    world = World(host=True, k=7)
    for name in long_lived(4):
        world.add(name, 1, 20)
    world.finish()
    lengths = {row.num_drafts for batch in world.batches for row in batch.rows if row.kind is RowKind.VERIFY}
    assert 0 in lengths
    assert max(lengths) > 1


@LAGS
@HOSTS
def test_drafts_of_no_use_are_not_asked_for(lag: int, host: bool) -> None:
    world = World(lag=lag, host=host, k=7)
    [name] = long_lived(1)
    world.add(name, 1, 3)
    first = world.launch()
    assert first is not None
    assert first.rows[0].want_drafts == 1  # one token comes now; a draft and the bonus token would be the other two
    while world.flight:
        world.settle()
        world.launch()
    world.finish()
    assert world.output(name)[1] is FinishReason.LENGTH


def test_what_is_certainly_over_is_not_planned_again() -> None:
    world = World(lag=1)
    a, b = long_lived(2)
    world.add(a, 1, 2)
    world.add(b, 1, 3)
    assert len(shape(world.launch())) == 2
    assert len(shape(world.launch())) == 2
    world.settle()
    assert shape(world.launch()) == [(b, RowKind.DECODE, 1)]
    world.settle()
    assert world.launch() is None
    world.finish()


@LAGS
def test_a_sequence_is_never_planned_deeper_than_the_lag(lag: int) -> None:
    world = World(lag=lag, budget=2)
    [name] = long_lived(1)
    world.add(name, 12, 9)
    for _ in range(1 + lag):
        assert world.launch() is not None
    assert world.launch() is None
    world.settle()
    assert world.launch() is not None
    world.finish()


def test_a_proposer_on_the_host_waits_for_its_tokens_and_the_wait_is_counted() -> None:
    world = World(lag=1, host=True, k=2)
    a, b = long_lived(2)
    world.add(a, 1, 9)
    world.add(b, 1, 9, num_drafts=0)
    world.launch()
    assert world.stats().settle_waits == 0
    assert shape(world.launch()) == [(b, RowKind.DECODE, 1)]
    assert world.stats().settle_waits == 1
    world.finish()


def test_a_scarce_budget_goes_round() -> None:
    world = World(budget=4, k=1, num_seqs=4)
    names = long_lived(4, least=60)
    for name in names:
        world.add(name, 1, 60)
    world.step()
    counts = dict.fromkeys(names, 0)
    for _ in range(12):
        for name, _kind, _fed in shape(world.launch()):
            counts[name] += 1
        world.settle()
    assert set(counts.values()) == {6}
    world.finish()


@LAGS
@HOSTS
@pytest.mark.parametrize("blocks", range(10, 16))
@pytest.mark.parametrize("budget", [2, 3, 4])
def test_who_cannot_grow_does_not_hold_a_scarce_budget(lag: int, host: bool, blocks: int, budget: int) -> None:
    world = World(lag=lag, host=host, k=1, budget=budget, block_size=1, blocks=blocks, max_len=8, num_seqs=3)
    for name in long_lived(3):
        world.add(name, 1, 7)
    world.finish()


def test_admission_does_not_overtake() -> None:
    world = World(blocks=6, block_size=4, max_len=24)
    world.add("a", 12, 2)
    world.add("b", 20, 2)
    world.add("c", 1, 1)
    assert [row.seq.request.id for row in (world.launch() or Batch(0, ())).rows] == ["a"]
    assert world.stats().waiting_kv == 2
    world.settle()
    world.finish()


def test_the_youngest_is_preempted_and_resumes_first() -> None:
    world = World(blocks=6, block_size=2, max_len=12, slots=3)
    a, b, c = long_lived(3)
    for name in (a, b, c):
        world.add(name, 2, 10)
    while not world.stats().preemptions_kv:
        world.step()
    waiting = [seq.request.id for seq in world.scheduler._waiting]
    assert waiting in ([b, c], [c])
    assert world.stats().running == 3 - len(waiting)
    world.finish()
    resumed = [row for batch in world.batches for row in batch.rows if len(row.tokens) > 2 and row.emits]
    assert resumed
    assert all(row.kind is RowKind.PREFILL and row.start == 0 for row in resumed)


@LAGS
@pytest.mark.parametrize("k", [0, 3])
def test_preemption_at_every_step_changes_nothing(lag: int, k: int) -> None:
    for when in range(1, 14):
        world = World(lag=lag, k=k, budget=5)
        [name] = long_lived(1, start=9, least=12)
        world.add(name, 9, 12)
        for _ in range(when):
            if name in world.scheduler._live:
                world.step()
        if world.scheduler._running:
            world.scheduler._preempt(world.scheduler._running[-1])
        world.finish()
        assert world.output(name) == (list(prompt_of(name, 21))[9:], FinishReason.LENGTH)


def test_a_step_in_flight_keeps_what_its_sequence_lost() -> None:
    world = World(lag=1, slots=1)
    [name] = long_lived(1)
    world.add(name, 4, 5)
    world.launch()
    world.scheduler._preempt(world.scheduler._running[-1])
    assert world.launch() is None
    assert world.stats().waiting_state == 1
    assert world.ledger.used_slots == 1
    assert world.settle() == []
    assert world.stats().tokens_discarded == 1
    assert world.ledger.used_slots == 0
    world.finish()


def test_an_outcome_for_a_lost_lease_is_dropped_although_its_request_runs_again() -> None:
    world = World(lag=1, slots=2)
    [name] = long_lived(1)
    world.add(name, 4, 5)
    world.launch()
    world.scheduler._preempt(world.scheduler._running[-1])
    batch = world.launch()
    assert shape(batch) == [(name, RowKind.PREFILL, 4)]
    assert world.settle() == []
    assert world.stats().tokens_discarded == 1
    assert len(world.settle()) == 1
    world.finish()


def test_blocks_that_come_back_by_themselves_are_awaited() -> None:
    """Nobody is preempted while the last step of an ended request holds enough blocks."""
    world = World(lag=1, blocks=12, block_size=1, max_len=12, num_seqs=3, slots=3)
    a, b, c = long_lived(3)
    for name in (a, b, c):
        world.add(name, 1, 5)
    for _ in range(4):
        world.step()
    assert (world.ledger.free_blocks, len(world.flight)) == (0, 1)
    world.cancel(c)
    assert world.launch() is None
    world.settle()
    assert len(shape(world.launch())) == 2
    world.finish()
    assert world.stats().preemptions_kv == 0


@LAGS
@pytest.mark.parametrize("k", [0, 1, 7])
def test_admission_counts_the_steps_that_follow(lag: int, k: int) -> None:
    world = World(lag=lag, k=k, block_size=1)
    world.add("a", 5, 40)
    batch = world.launch()
    assert batch is not None
    assert len(batch.rows[0].lease.blocks) == 5 + (1 + lag) * (1 + k) + k
    world.finish()
