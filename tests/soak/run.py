"""One server under load for a while, and what must be true of it then."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.bench.servers import started
from tests.soak.client import Connection, Reply
from tests.soak.watch import KIB, Page, Watch, child_of
from tests.soak.work import Item, Judge

CLIENTS = 22
LEAVING = 0.3
SAMPLE_SECONDS = 1.0
WARM_SHARE = 0.25
IDLE_SECONDS = 60.0
FULL = 0.9
LONG = 45.0
LEAK_PER_REQUEST = 1.0 * KIB
NOISE_BYTES = 24 * KIB * KIB  # what an allocator moves by itself, however short the run
MOST_TIES = 0.01

# More clients than seats and places; a slot per seat; blocks for about as many prompts as there are seats; states for
# some of the prefixes.
SERVER = (
    *("--max-num-seqs", "8", "--num-slots", "9", "--num-blocks", "46", "--max-model-len", "256"),
    *("--num-checkpoints", "24", "--checkpoint-interval", "64", "--max-queued-requests", "12"),
    *("--audit-interval", "40"),
)
WAYS: dict[str, tuple[str, ...]] = {
    "mtp:3, replay, lag 1": ("--speculative", "mtp:3", "--decode-backend", "replay", "--settle-lag", "1"),
    "ngram:4, snapshot, lag 0": ("--speculative", "ngram:4", "--decode-backend", "snapshot", "--settle-lag", "0"),
}


@dataclass
class Report:
    """What came of one way. `failures` is empty when all is well."""

    way: str
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    facts: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def require(self, holds: bool, what: str) -> None:
        """Notes a failure unless it holds."""
        if not holds:
            self.failures.append(what)


Say = Callable[[str], None]


def soak(way: str, seconds: float, items: Sequence[Item], *, seed: int, say: Say) -> Report:
    """Runs one way."""
    report = Report(way)
    with started([(way, [*SERVER, *WAYS[way]])], seconds=300, say=say) as (server,):
        watch = Watch(server.url, server.pid, child_of(server.pid))
        begun = time.monotonic()
        asyncio.run(_Load(watch, items, seed, report, say).run(seconds))
        report.seconds = time.monotonic() - begun
        page = _settled(server.url)
        _judge(report, watch, page)
    return report


class _Load:
    """The clients of one run."""

    def __init__(self, watch: Watch, items: Sequence[Item], seed: int, report: Report, say: Say) -> None:
        self._watch = watch
        self._items = items
        self._judge = Judge(list(items))
        self._dice = random.Random(seed)
        self._report = report
        self._say = say
        self._begun = 0

    async def run(self, seconds: float) -> None:
        """Until the time is over and everybody has an answer."""
        over = asyncio.Event()
        watching = asyncio.create_task(self._look(seconds))
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(over))
            await asyncio.sleep(seconds)
            over.set()
        watching.cancel()

    async def _client(self, over: asyncio.Event) -> None:
        connection = Connection(self._watch.url)
        counts = self._report.counts
        while not over.is_set():
            item = self._dice.choice(self._items)
            leave = self._dice.choice((0, 1, 1, 2, 3)) if self._dice.random() < LEAVING else None
            self._begun += 1
            try:
                reply = await connection.ask(item.body() | {"priority": self._dice.choice((0, 0, 0, -1, 1))}, leave)
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                counts["broken"] += 1
                self._report.failures.append(f"a connection broke: {error!r}")
                connection.close()
                continue
            counts["asked"] += 1
            if reply.status == 429:
                counts["refused"] += 1
                self._report.require(reply.retry_after >= 1, "a 429 without Retry-After")
                await asyncio.sleep(0.5)
            elif leave == 0:
                counts["left"] += 1
            else:
                self._check(item, reply)
        connection.close()

    def _check(self, item: Item, reply: Reply) -> None:
        counts = self._report.counts
        if reply.status != 200 or reply.error or not (reply.complete or reply.left):
            counts["errors"] += 1
            self._report.failures.append(f"HTTP {reply.status}: {reply.error[:200]}")
            return
        counts["left" if reply.left else "answered"] += 1
        verdict = self._judge.verdict(item, reply.tokens, reply.text, whole=reply.complete)
        counts[verdict] += 1
        if verdict in ("wrong", "leak"):
            self._report.failures.append(f"{verdict}: asked for {item.secret!r}, got {reply.text!r} {reply.tokens}")

    async def _look(self, seconds: float) -> None:
        start, watch = time.monotonic(), self._watch
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            await asyncio.to_thread(watch.look, self._begun)
            counts = self._report.counts
            memory = {name: points[-1][1] / KIB / KIB for name, points in watch.memory.items()}
            self._say(
                f"{self._report.way} {time.monotonic() - start:.0f}/{seconds:.0f} s: {counts['answered']} answered, "
                f"{counts['left']} left, {counts['refused']} refused, {len(self._report.failures)} failures; blocks "
                f"{watch.blocks[-1]:.0%}, slots {watch.slots[-1]:.0%}; server {memory['server']:.0f} MiB, engine "
                f"{memory['engine']:.0f} MiB, {watch.busy():.1f} cores"
            )


def _settled(url: str) -> Page:
    """The page once nothing is being served, or after a time in which that should have come."""
    deadline = time.monotonic() + IDLE_SECONDS
    while (page := Page.read(url)).left() and time.monotonic() < deadline:
        time.sleep(0.2)
    return page


def _judge(report: Report, watch: Watch, page: Page) -> None:
    counts = report.counts
    report.require(counts["answered"] > 0, "nothing was answered")
    report.require(counts["near tie"] <= MOST_TIES * max(counts["answered"], 100), f"{counts['near tie']} near ties")
    for name, left in page.left().items():
        report.failures.append(f"{name} at the end: {left:g}")
    for name in ("state_commit_missing_total", "non_finite_rows_total", "requests_stuck_total"):
        report.require(page.total(name) == 0, f"{name} is {page.total(name):g}")
    report.require(page.total("state_audit_total", '"mismatch"') == 0, "an audit found another state")
    for name in ("state_audit_total", "spec_accepted_tokens_total", "prefix_cache_hit_tokens_total"):
        report.require(page.total(name) > 0 or report.seconds < LONG, f"{name} is 0")
    blocks, slots = statistics.median(watch.blocks or [0.0]), max(watch.slots, default=0.0)
    report.facts.append(f"blocks in use: {blocks:.1%} in the middle of the run; slots: {slots:.1%} at most")
    if report.seconds >= LONG:  # a machine that is busy with something else cannot fill the pools in seconds
        report.require(blocks > FULL, f"only {blocks:.1%} of the blocks were in use")
        # The page shows the pool between two steps, when the slots of those who just ended are not taken yet.
        report.require(slots > FULL, f"at most {slots:.1%} of the slots were in use")
    report.require(len(set(watch.series)) <= 1, f"the page has {min(watch.series)} to {max(watch.series)} series")
    report.facts.append(f"most entries in tables of requests: {max(watch.tables, default=0):g}")
    warm = int(WARM_SHARE * len(watch.blocks))
    for name in ("server", "engine"):
        rise, total = watch.growth(name, warm)
        quarters = ", ".join(f"{each:+.0f}" for each in watch.quarters(name))
        report.facts.append(
            f"{name} memory: {rise:+.0f} bytes per request after warm-up, {total / KIB:+.0f} KiB in all ({quarters})"
        )
        leaks = rise > LEAK_PER_REQUEST and total > NOISE_BYTES
        report.require(not leaks, f"the {name} process grows by {rise:.0f} bytes per request")
    done = page.total("request_preemptions_total"), page.total("state_checkpoint_evictions_total")
    report.facts.append(f"preemptions: {done[0]:g}, evicted checkpoints: {done[1]:g}")
