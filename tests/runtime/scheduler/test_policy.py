"""Who goes first, who waits how long, and what happens when nothing can go on. Counted in tokens, never in seconds."""

from __future__ import annotations

import itertools
import random

import pytest

from runtime.api import FinishReason
from runtime.plan import Batch, RowKind
from runtime.scheduler import STUCK
from tests.support.scheduling import HOSTS, LAGS, World, long_lived


def names_of(batch: Batch | None) -> list[str]:
    return [] if batch is None else [row.seq.request.id for row in batch.rows]


def starts(world: World) -> list[str]:
    """Names in the order of their first rows."""
    return list(dict.fromkeys(name for batch in world.batches for name in names_of(batch)))


# --- priority


@pytest.mark.parametrize("lag", [0, 1])
def test_a_lower_number_goes_first_and_equals_go_in_order(lag: int) -> None:
    world = World(lag=lag, num_seqs=1, aging=1000)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0), ("f", -100)):
        world.add(name, 3, 2, priority=priority)
    world.finish()
    assert starts(world) == ["f", "c", "a", "e", "b", "d"]


def test_who_runs_is_not_turned_out_by_who_comes() -> None:
    world = World(num_seqs=1, aging=1000)
    [name] = long_lived(1)
    world.add(name, 3, 20, priority=9)
    world.step()
    world.add("b", 3, 2, priority=-100)
    world.finish()
    assert starts(world) == [name, "b"]
    assert world.stats().preemptions_kv == 0


@pytest.mark.parametrize("aging", [1, 20])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 1), (-100, 0)])
def test_nobody_starves(low: int, high: int, aging: int) -> None:
    """An endless stream of urgent requests: the other one waits its head start, what runs then, and not longer."""
    world = World(num_seqs=2, aging=aging, blocks=64)
    world.add("patient", 3, 2, priority=high)
    fed = 0
    for number in range(9000):
        for copy in range(2):
            if len(world.scheduler._waiting) < 10:
                world.add(f"urgent{number}-{copy}", 4, 3, priority=low)
        world.step()
        fed += world.batches[-1].num_tokens
        if world.asked["patient"].finish is not None:
            break
    head_start = (high - low) * aging
    assert world.asked["patient"].finish is not None
    assert all(seq.rank[0] >= high * aging for seq in world.scheduler._waiting)
    # Who came within the head start, at most 10 waiting and 2 running, feeds 4 + 2 tokens each; and so do the two.
    assert head_start <= fed <= head_start + 14 * 6
    world.finish()


def test_the_least_urgent_gives_room_first() -> None:
    world = World(blocks=6, block_size=2, max_len=12, slots=3, aging=1000)
    a, b, c = long_lived(3)
    for name, priority in ((a, 7), (b, 0), (c, -7)):
        world.add(name, 2, 10, priority=priority)
    while not world.stats().preemptions_kv:
        world.step()
    assert a in [seq.request.id for seq in world.scheduler._waiting]
    assert world.scheduler._running[0].request.id == c
    world.finish()
    ends = sorted(world.asked, key=lambda name: len(world.asked[name].tokens))
    assert len(ends) == 3


# --- inter-token latency


def gaps(world: World) -> dict[str, list[int]]:
    """Per decoding sequence: tokens fed by all steps after one of its rows, up to and with the next."""
    seen: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    fed = 0
    for batch in world.batches:
        fed += batch.num_tokens
        for row in batch.rows:
            name = row.seq.request.id
            if row.kind is not RowKind.PREFILL and name in seen:
                found.setdefault(name, []).append(fed - seen[name])
            if row.emits:
                seen[name] = fed
    return found


@LAGS
@HOSTS
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("prefill", [0, 1, 6])
def test_between_two_rows_of_a_decoding_request_lies_at_most_one_budget(
    lag: int, host: bool, k: int, prefill: int
) -> None:
    """The stated bound, with long prompts coming all the time and rows that fit the budget."""
    budget = 24
    world = World(lag=lag, host=host, k=k, budget=budget, prefill=prefill, num_seqs=4, max_len=64, blocks=200)
    dice = random.Random(f"{lag}{host}{k}{prefill}")
    world.add("first", 60, 4)
    for number in range(40):
        if dice.random() < 0.5:
            long = dice.random() < 0.5
            world.add(f"r{number}", 60 if long else dice.choice([1, 2, 9]), 30)
        world.step()
    world.finish()
    # A proposer on the host may let a row wait for one step in flight; everybody else has one in every step.
    steps = 2 if host and lag and k else 1
    assert gaps(world)
    for name, distances in gaps(world).items():
        assert max(distances) <= steps * budget, name
    others = [
        sum(row.num_fed for row in batch.rows if row.kind is RowKind.PREFILL)
        for batch in world.batches
        if any(row.kind is not RowKind.PREFILL for row in batch.rows)
    ]
    assert max(others) <= (prefill or budget - 1)
    alone = [batch.num_tokens for batch in world.batches if all(row.kind is RowKind.PREFILL for row in batch.rows)]
    assert max(alone) > 6, "a step in which nobody decodes may use the whole budget"


@pytest.mark.parametrize("budget", [2, 4, 8, 16])
def test_a_budget_too_small_for_all_is_shared(budget: int) -> None:
    """Twelve rows of two tokens: everybody has a row in turn, and prompts keep their eighth."""
    world = World(budget=budget, k=1, num_seqs=12, slots=12, blocks=400, max_len=100)
    names = long_lived(12, least=60)
    for name in names:
        world.add(name, 1, 60)
    for _ in range(200):
        world.step()
    in_turn = -(-12 // max(1, (budget - budget // 8) // 2))
    for name in names:
        rows = [i for i, batch in enumerate(world.batches) if name in names_of(batch)]
        assert max((b - a for a, b in itertools.pairwise(rows)), default=0) <= 2 * in_turn
    if budget >= 8:
        assert starts(world) == names
        assert max(world.batches.index(batch) for batch in world.batches if batch.rows[0].kind is RowKind.PREFILL) < 20
    world.finish()


# --- no progress


@LAGS
@pytest.mark.parametrize("waiting", [1, 3])
def test_who_waits_for_what_never_comes_fails_alone_and_is_counted(lag: int, waiting: int) -> None:
    world = World(lag=lag, slots=1, blocks=8)
    stranger = world.ledger.admit("stranger", 1)
    names = [f"w{i}" for i in range(waiting)]
    for name in names:
        world.add(name, 1)
    assert world.launch() is None
    world.asked[names[0]].failed = True
    (ended,) = world.hear(world.scheduler.take_ended())
    assert (ended.request_id, ended.finish, ended.error) == (names[0], FinishReason.ERROR, STUCK)
    assert world.stats().stuck_requests == 1
    assert len(world.scheduler._waiting) == waiting - 1
    world.ledger.release(stranger)  # type: ignore[arg-type]
    world.finish()
    assert world.stats().stuck_requests == 1


@LAGS
def test_who_cannot_grow_and_has_nobody_to_take_from_fails_alone(lag: int) -> None:
    world = World(lag=lag, slots=2, blocks=8, max_len=30)
    [name] = long_lived(1, least=29)
    world.add(name, 1, 29)
    world.step()
    stranger = world.ledger.admit("stranger", world.ledger.free_blocks * 4)
    world.add("b", 1, 2)
    world.asked[name].failed = True
    for _ in range(20):
        world.step()
        world.hear(world.scheduler.take_ended())
        if world.asked[name].finish is not None:
            break
    assert world.output(name)[1] is FinishReason.ERROR
    assert 0 < len(world.output(name)[0]) < 29
    world.ledger.release(stranger)  # type: ignore[arg-type]
    world.finish()
    assert world.asked["b"].finish is not FinishReason.ERROR
    assert world.stats().stuck_requests == 1
