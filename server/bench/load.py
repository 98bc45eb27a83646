"""Load on one server at a time: a number of clients in a closed loop, or arrivals of a Poisson process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from server.bench.sample import Sample

ERROR_PAUSE = 0.05  # a client whose request failed waits, so that a dead server is not flooded

One = Callable[[int], Awaitable[Sample]]  # prompt index -> its sample


@dataclass(frozen=True)
class Level:
    """How much load: `concurrency` clients, or `rate` requests per second."""

    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"c={self.concurrency}" if self.concurrency else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Amount:
    """How long: a number of requests, or until `seconds` are over (what runs then is finished)."""

    requests: int | None = None
    seconds: float | None = None

    def allows(self, begun: int, elapsed: float) -> bool:
        """Whether one more request may begin."""
        if self.requests is not None:
            return begun < self.requests
        return self.seconds is not None and elapsed < self.seconds


@dataclass(frozen=True)
class Run:
    """What came of one load on one server. `client_cpu` is the share of a core this process used."""

    samples: tuple[Sample, ...]
    seconds: float
    client_cpu: float


async def closed_loop(one: One, concurrency: int, amount: Amount, first: int) -> list[Sample]:
    """`concurrency` clients, each of which asks again when it has its answer."""
    samples: list[Sample] = []
    start = time.perf_counter()
    begun = 0

    async def client() -> None:
        nonlocal begun
        while amount.allows(begun, time.perf_counter() - start):
            begun += 1
            sample = await one(first + begun - 1)
            samples.append(sample)
            if sample.error is not None:
                await asyncio.sleep(ERROR_PAUSE)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return samples


def arrivals(rate: float, amount: Amount, seed: str) -> list[float]:
    """Seconds at which requests begin: exponential gaps, the same for the same seed; at least one request."""
    rng = random.Random(seed)
    at: list[float] = []
    now = 0.0
    while amount.allows(len(at), now):
        at.append(now)
        now += rng.expovariate(rate)
    return at or [0.0]


async def open_loop(one: One, times: list[float], first: int) -> list[Sample]:
    """Requests begin at given times, whatever became of the earlier ones."""
    start = time.perf_counter()
    tasks: list[asyncio.Task[Sample]] = []

    async def begin(index: int) -> Sample:
        return await one(index)

    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(times):
            await asyncio.sleep(max(start + at - time.perf_counter(), 0))
            tasks.append(group.create_task(begin(first + number)))
    return [task.result() for task in tasks]


async def run(one: One, level: Level, amount: Amount, *, first: int, seed: str) -> Run:
    """One load; prompts are numbered from `first` on. Times in the samples become relative to the start."""
    start, cpu = time.perf_counter(), time.process_time()
    if level.concurrency:
        samples = await closed_loop(one, level.concurrency, amount, first)
    else:
        samples = await open_loop(one, arrivals(level.rate, amount, seed), first)
    seconds = max((sample.ended for sample in samples), default=start) - start
    seconds = max(seconds, 1e-9)
    share = (time.process_time() - cpu) / seconds
    return Run(tuple(shifted(sample, start) for sample in sorted(samples, key=by_prompt)), seconds, share)


def by_prompt(sample: Sample) -> int:
    """Order of samples."""
    return sample.prompt


def shifted(sample: Sample, start: float) -> Sample:
    """With times counted from `start`."""
    emissions = tuple(replace(emission, at=emission.at - start) for emission in sample.emissions)
    return replace(sample, started=sample.started - start, ended=sample.ended - start, emissions=emissions)
