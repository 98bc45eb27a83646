"""Cancelling, failing, finishing."""

from __future__ import annotations

import pytest

from runtime.api import (
    FinishReason,
    Request,
    SamplingParams,
)
from runtime.plan import RowKind
from tests.support.scheduling import (
    HOSTS,
    LAGS,
    World,
    long_lived,
    prompt_of,
    shape,
)


@LAGS
@HOSTS
@pytest.mark.parametrize("when", range(9))
def test_cancel_at_any_moment(lag: int, host: bool, when: int) -> None:
    world = World(lag=lag, host=host, k=2, budget=4, num_seqs=2, blocks=20)
    names = long_lived(3, start=7, least=9)
    for name in names:
        world.add(name, 7, 9)
    for _ in range(when):
        world.step()
    for name in names:
        alive = world.asked[name].finish is None
        assert world.cancel(name) is alive
        assert not world.cancel(name)
    world.finish()


def test_cancel_takes_exact_names() -> None:
    world = World()
    world.add("ab", 3)
    for name in ("a", "abc", "", "AB"):
        assert not world.cancel(name)
    assert world.cancel("ab")
    world.finish()


@pytest.mark.parametrize(("keep", "discarded"), [(0, 3), (1, 2), (3, 0), (9, 0)])
def test_tokens_nobody_got_are_counted_as_discarded(keep: int, discarded: int) -> None:
    world = World()
    [name] = long_lived(1)
    world.add(name, 1, 9)
    for _ in range(3):
        world.step()
    world.cancel(name, keep)
    assert world.stats().tokens_discarded == discarded
    world.finish()


def test_a_late_outcome_of_a_cancelled_request_is_dropped() -> None:
    world = World(lag=1, slots=1)
    a, b = long_lived(2)
    world.add(a, 2, 9)
    world.add(b, 2, 9)
    world.launch()
    world.cancel(a)
    assert world.launch() is None  # the only slot is not free before the step that uses it settles
    assert world.settle() == []
    assert world.stats().tokens_discarded == 1
    assert shape(world.launch()) == [(b, RowKind.PREFILL, 2)]
    world.finish()


def test_the_last_delta_waits_for_the_step() -> None:
    world = World()
    world.add("a", 2)
    world.scheduler.cancel("a", keep=0, now=5.0)
    assert world.scheduler.has_work
    [delta] = world.scheduler.take_ended()
    assert (delta.request_id, delta.finish, delta.tokens) == ("a", FinishReason.ABORT, ())
    assert not world.scheduler.has_work
    assert world.scheduler.take_ended() == []


@LAGS
@pytest.mark.parametrize("k", [0, 7])
def test_a_row_that_fails_ends_its_request_alone(lag: int, k: int) -> None:
    world = World(lag=lag, k=k)
    world.add("bad!", 5, 9)
    world.add("good", 5, 9)
    world.finish()
    assert world.output("bad!")[1] is FinishReason.ERROR


@LAGS
def test_a_step_that_raises_ends_its_requests(lag: int) -> None:
    world = World(lag=lag, num_seqs=2)
    names = long_lived(3)
    for name in names:
        world.add(name, 2, 9)
    world.step()
    world.fail()
    assert [world.asked[name].finish for name in names] == [FinishReason.ERROR, FinishReason.ERROR, None]
    world.finish()
    assert world.output(names[2])[1] is FinishReason.LENGTH


def test_timing_is_told_at_the_end() -> None:
    world = World()
    scheduler, ledger = world.scheduler, world.ledger
    [name] = long_lived(1)
    request = Request(id=name, prompt=prompt_of(name, 1), sampling=SamplingParams(max_tokens=2))
    scheduler.add(request, 10.0)
    timing = None
    for planned, told in ((11.0, 13.0), (14.0, 17.0)):
        batch = scheduler.schedule(planned)
        assert batch is not None
        ledger.begin(batch.rows[0].lease, 1)
        outcome = world.device.run(batch)
        ledger.settle(batch.rows[0].lease, 1, 1)
        [delta] = scheduler.update(batch, outcome, told)
        timing = delta.timing
    assert timing is not None
    assert (timing.queued, timing.prefill, timing.decode) == (1.0, 2.0, 4.0)
