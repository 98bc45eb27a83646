"""Closed loops keep to their concurrency, open loops to their times, both to their amount."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time

import pytest

from server.bench.load import Amount, Level, Run, arrivals, run
from server.bench.sample import Sample


class Server:
    """Answers after a while and watches how many it has at once."""

    def __init__(self, seconds: float, error: str | None = None) -> None:
        self.seconds = seconds
        self.error = error
        self.running = 0
        self.most = 0
        self.asked: list[int] = []

    async def __call__(self, index: int) -> Sample:
        self.asked.append(index)
        self.running += 1
        self.most = max(self.most, self.running)
        started = time.perf_counter()
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return Sample(prompt=index, started=started, ended=time.perf_counter(), error=self.error)


def load(server: Server, level: Level, amount: Amount, first: int = 0) -> Run:
    return asyncio.run(run(server, level, amount, first=first, seed="s"))


@pytest.mark.parametrize(("concurrency", "requests"), [(1, 3), (4, 10), (8, 3)])
def test_closed_loop(concurrency: int, requests: int) -> None:
    server = Server(0.005)
    done = load(server, Level(concurrency=concurrency), Amount(requests=requests), first=100)
    assert server.most == min(concurrency, requests)
    assert [sample.prompt for sample in done.samples] == list(range(100, 100 + requests))
    assert min(sample.started for sample in done.samples) < done.seconds
    assert max(sample.ended for sample in done.samples) == pytest.approx(done.seconds)


def test_a_time_ends_the_beginning_of_requests_not_the_requests() -> None:
    server = Server(0.03)
    done = load(server, Level(concurrency=2), Amount(seconds=0.05))
    assert len(done.samples) >= 2
    assert all(sample.started < 0.05 for sample in done.samples)
    assert done.seconds > 0.03


def test_a_failing_server_is_not_flooded() -> None:
    server = Server(0.0, error="down")
    load(server, Level(concurrency=1), Amount(seconds=0.12))
    assert len(server.asked) <= 3


def test_arrivals_are_poisson_and_repeatable() -> None:
    times = arrivals(50.0, Amount(requests=2000), "s")
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert times == arrivals(50.0, Amount(requests=2000), "s")
    assert times != arrivals(50.0, Amount(requests=2000), "t")
    assert max(arrivals(50.0, Amount(seconds=1.0), "s")) < 1.0
    assert arrivals(0.001, Amount(seconds=1.0), "s") == [0.0]


def test_open_loop_does_not_wait_for_answers() -> None:
    server = Server(0.2)
    done = load(server, Level(rate=200.0), Amount(requests=10))
    assert server.most == 10
    assert len(done.samples) == 10
    assert str(Level(rate=200.0)) == "200/s"
