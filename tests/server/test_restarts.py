"""When an engine is started again: pure arithmetic."""

from __future__ import annotations

import pytest

from server.restarts import MAX_DELAY, Restarts


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_so_many_in_a_row_and_no_more(limit: int) -> None:
    restarts = Restarts(limit, 1.0, 600.0)
    delays = [restarts.next_delay(5.0) for _ in range(limit + 3)]
    assert delays == [2.0**i for i in range(limit)] + [None] * 3


@pytest.mark.parametrize("backoff", [0.0, 1.0, 60.0])
def test_the_wait_doubles_up_to_a_bound(backoff: float) -> None:
    restarts = Restarts(1000, backoff, 600.0)
    delays = [restarts.next_delay(0.0) for _ in range(1000)]
    assert all(delay is not None and delay <= MAX_DELAY for delay in delays)
    assert delays[:2] == [backoff, min(2 * backoff, MAX_DELAY)]
    assert delays[-1] == (MAX_DELAY if backoff else 0.0)


def test_an_engine_that_served_long_enough_ends_the_row() -> None:
    restarts = Restarts(2, 1.0, 600.0)
    assert [restarts.next_delay(served) for served in (0.0, 599.9, 600.0, 1.0, 1.0)] == [1.0, 2.0, 1.0, 2.0, None]


def test_after_the_last_one_a_long_life_would_start_anew() -> None:
    restarts = Restarts(1, 1.0, 600.0)
    assert [restarts.next_delay(served) for served in (0.0, 0.0, 601.0)] == [1.0, None, 1.0]
