"""A scheduler and a fake device whose text is a pure function of request and position.

So whatever is preempted, cut, retried or late, every request must end with exactly the tokens it would get alone.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import pytest

from runtime.api import (
    Accepted,
    Delta,
    EngineStats,
    FinishReason,
    Rejected,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from runtime.plan import Batch, Outcome, Row, RowKind, Sequence, StateLease
from runtime.scheduler import Drafting, Limits, Scheduler
from runtime.state.ledger import Ledger

ORDER = [RowKind.PREFILL, RowKind.DECODE, RowKind.VERIFY]
WRONG = -5
LAGS = pytest.mark.parametrize("lag", [0, 1])
HOSTS = pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
DRAFTS = pytest.mark.parametrize("k", [0, 1, 7])


def noise(*key: object) -> int:
    return zlib.crc32(repr(key).encode())


def token_at(name: str, position: int) -> int:
    return noise(name, position) % 1000


def is_stop(name: str, position: int) -> bool:
    return noise("stop", name, position) % 12 == 0


def is_bad(name: str, position: int) -> bool:
    return name.endswith("!") and position >= 6


def prompt_of(name: str, length: int) -> tuple[int, ...]:
    return tuple(token_at(name, position) for position in range(length))


def expected(name: str, start: int, max_total: int) -> tuple[list[int], FinishReason]:
    """What the request says when nothing disturbs it."""
    tokens: list[int] = []
    for position in range(start, max_total):
        if is_bad(name, position):
            return tokens, FinishReason.ERROR
        tokens.append(token_at(name, position))
        if is_stop(name, position):
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


@dataclass
class Held:
    """What the device knows of one lease: committed length, known tokens, drafts for the next row."""

    length: int = 0
    known: int = 0
    drafts: tuple[int, ...] = ()
    over: bool = False


@dataclass
class FakeDevice:
    """Runs a batch when it is planned; the outcome is told whenever the test settles it."""

    host: bool
    block_size: int
    k_max: int
    held: dict[int, Held] = field(default_factory=dict)

    def run(self, batch: Batch) -> Outcome:
        results = [self.run_row(row, self.held.setdefault(row.lease.serial, Held())) for row in batch.rows]
        kept, emitted, finish, drafts = zip(*results, strict=True)
        errors = tuple("not finite" if reason is FinishReason.ERROR else None for reason in finish)
        logprobs = tuple(tuple(TokenLogprobs(token, -1.0) for token in tokens) for tokens in emitted)
        told = drafts if self.host else ()
        return Outcome(kept, emitted, finish, errors, told, logprobs)

    def run_row(self, row: Row, held: Held) -> tuple[int, tuple[int, ...], FinishReason | None, tuple[int, ...]]:
        name = row.seq.request.id
        drafts = self.fed_drafts(row, held)
        self.assert_written(row.lease, held.length + row.num_fed)
        if held.over:
            held.length += 1
            self.assert_written(row.lease, held.length + max(row.want_drafts - 1, 0))
            return 1, (777,), None, ()
        if row.kind is RowKind.PREFILL:
            held.length += row.num_fed
            if not row.emits:
                return row.num_fed, (), None, ()
            held.known, kept = held.length, row.num_fed
        else:
            kept = 1
        emitted: list[int] = []
        finish: FinishReason | None = None
        for draft in [*drafts, None]:
            position = held.known
            if is_bad(name, position):
                held.over = True
                return 0 if row.kind is not RowKind.PREFILL else kept, (), FinishReason.ERROR, ()
            emitted.append(token_at(name, position))
            held.known += 1
            if is_stop(name, position):
                finish = FinishReason.STOP
            elif held.known == row.seq.max_total:
                finish = FinishReason.LENGTH
            if finish is not None or draft != emitted[-1]:
                break
        if row.kind is not RowKind.PREFILL:
            kept = len(emitted)
            held.length += kept
        held.over = finish is not None
        assert held.known == held.length + 1
        self.assert_written(row.lease, held.length + max(row.want_drafts - 1, 0))
        held.drafts = tuple(self.draft(name, held.known, i) for i in range(row.want_drafts))
        if self.host:
            held.drafts = held.drafts[: noise("found", name, held.known) % (self.k_max + 1)]
        return kept, tuple(emitted), finish, held.drafts

    def draft(self, name: str, known: int, i: int) -> int:
        """Right up to some depth, wrong from there."""
        return token_at(name, known + i) if i < noise("right", name, known) % (self.k_max + 2) else WRONG

    def fed_drafts(self, row: Row, held: Held) -> tuple[int, ...]:
        if row.kind is RowKind.PREFILL:
            assert (row.start, row.drafts, row.num_drafts) == (held.length, None, 0)
            return ()
        if self.host:
            assert row.drafts is not None
            assert row.drafts == held.drafts[: row.num_drafts]
            return row.drafts
        assert row.drafts is None
        assert held.over or row.num_drafts == len(held.drafts)
        return held.drafts[: row.num_drafts]

    def assert_written(self, lease: StateLease, end: int) -> None:
        """Every position below `end` has a block of the lease's own."""
        assert end <= len(lease.blocks) * self.block_size


@dataclass
class Asked:
    """What the test knows of a request, and what it was told."""

    start: int
    max_total: int
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cancelled: bool = False
    failed: bool = False
    drafted: int = 0


class World:
    """Scheduler, ledger and fake device, with the checks that hold in every step of every test."""

    def __init__(
        self,
        *,
        lag: int = 0,
        host: bool = False,
        k: int = 0,
        k_max: int | None = None,
        budget: int = 64,
        num_seqs: int = 4,
        max_len: int = 64,
        queued: int = 100,
        blocks: int = 64,
        block_size: int = 4,
        slots: int = 4,
        prefill: int = 0,
        queued_tokens: int = 0,
        aging: int = 16,
    ) -> None:
        k_max = k if k_max is None else k_max
        self.ledger = Ledger(num_blocks=blocks + 1, block_size=block_size, num_slots=slots + 1)
        self.limits = Limits(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_len,
            max_queued_requests=queued,
            k_max=k_max,
            settle_lag=lag,
            max_prefill_tokens=prefill,
            max_queued_tokens=queued_tokens,
            aging_tokens=aging,
        )
        self.scheduler = Scheduler(self.ledger, self.limits, Drafting(k=k, host=host))
        self.device = FakeDevice(host, block_size, k_max)
        self.flight: deque[tuple[Batch, Outcome]] = deque()
        self.asked: dict[str, Asked] = {}
        self.now = 0.0
        self.batches: list[Batch] = []
        self.without_row = 0
        self.num_heard = 0

    # --- what a test does

    def add(
        self, name: str, length: int, max_tokens: int = 5, num_drafts: int | None = None, *, priority: int = 0
    ) -> Accepted | Rejected:
        self.now += 1
        answer = self.scheduler.add(
            Request(
                id=name,
                prompt=prompt_of(name, length),
                sampling=SamplingParams(max_tokens=max_tokens),
                num_drafts=num_drafts,
                priority=priority,
            ),
            self.now,
        )
        if isinstance(answer, Accepted):
            self.asked[name] = Asked(length, min(length + max_tokens, self.scheduler.max_len))
        return answer

    def plan(self) -> Batch | None:
        self.now += 1
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            return None
        self.batches.append(batch)
        for row in batch.rows:
            self.ledger.begin(row.lease, row.num_fed)
        self.assert_planned(batch)
        return batch

    def launch(self) -> Batch | None:
        batch = self.plan()
        if batch is not None:
            self.flight.append((batch, self.device.run(batch)))
        return batch

    def settle(self) -> list[Delta]:
        self.now += 1
        batch, outcome = self.flight.popleft()
        for row, kept in zip(batch.rows, outcome.kept, strict=True):
            self.ledger.settle(row.lease, row.num_fed, kept)
        return self.hear(self.scheduler.update(batch, outcome, self.now))

    def step(self) -> list[Delta]:
        """As the engine does it: plan, then settle what is `lag` steps old."""
        batch = self.launch()
        if self.flight and (len(self.flight) > self.limits.settle_lag or batch is None):
            return self.settle()
        return []

    def fail(self) -> Batch | None:
        """A step raises in its forward."""
        batch = self.plan()
        if batch is None:
            return None
        for row in batch.rows:
            self.ledger.abort(row.lease, row.num_fed)
        for row in batch.rows:
            self.asked[row.seq.request.id].failed = True
        deltas = self.hear(self.scheduler.fail(batch, "boom", self.now))
        assert {delta.request_id for delta in deltas} == {row.seq.request.id for row in batch.rows}
        assert all((delta.finish, delta.error) == (FinishReason.ERROR, "boom") for delta in deltas)
        return batch

    def cancel(self, name: str, keep: int = 0) -> bool:
        self.now += 1
        known = self.scheduler.cancel(name, keep=keep, now=self.now)
        ended = self.scheduler.take_ended()
        assert [delta.request_id for delta in ended] == [name] * known
        if known:
            self.asked[name].cancelled = True
            assert ended[0].finish is FinishReason.ABORT
        self.hear(ended)
        return known

    def finish(self, limit: int = 3000) -> int:
        for count in range(limit):
            if not self.scheduler.has_work:
                self.assert_idle()
                return count
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def stats(self) -> EngineStats:
        stats = EngineStats()
        self.scheduler.fill(stats)
        return stats

    def output(self, name: str) -> tuple[list[int], FinishReason | None]:
        return self.asked[name].tokens, self.asked[name].finish

    # --- what always holds

    def hear(self, deltas: list[Delta]) -> list[Delta]:
        assert len({delta.request_id for delta in deltas}) == len(deltas)
        for delta in deltas:
            asked = self.asked[delta.request_id]
            assert asked.finish is None
            asked.tokens += delta.tokens
            self.num_heard += len(delta.tokens)
            asked.finish = delta.finish
            assert delta.drafted >= asked.drafted
            assert delta.accepted <= delta.drafted
            asked.drafted = delta.drafted
            assert delta.timing is not None or delta.finish is None
            assert (delta.error is not None) is (delta.finish is FinishReason.ERROR)
            if delta.logprobs is not None:
                assert tuple(entry.token for entry in delta.logprobs) == delta.tokens
            if delta.timing is not None:
                assert min(delta.timing.queued, delta.timing.prefill, delta.timing.decode) >= 0
            if asked.finish is not None:
                self.assert_answer(delta.request_id, asked)
        return deltas

    def assert_answer(self, name: str, asked: Asked) -> None:
        tokens, finish = expected(name, asked.start, asked.max_total)
        if asked.cancelled or asked.failed:
            assert asked.tokens == tokens[: len(asked.tokens)]
            assert asked.finish is (FinishReason.ABORT if asked.cancelled else FinishReason.ERROR)
        elif finish is FinishReason.ERROR:  # what a block emitted before its bad position is lost with it
            assert asked.finish is finish
            assert asked.tokens == tokens[: len(asked.tokens)]
        else:
            assert (asked.tokens, asked.finish) == (tokens, finish)

    def assert_planned(self, batch: Batch) -> None:
        limits = self.limits
        assert batch.rows
        assert 1 <= batch.num_tokens <= limits.max_num_batched_tokens
        assert len(batch.rows) <= limits.max_num_seqs
        assert len({id(row.seq) for row in batch.rows}) == len(batch.rows)
        kinds = [ORDER.index(row.kind) for row in batch.rows]
        assert kinds == sorted(kinds)
        for row in batch.rows:
            self.assert_row(row)
        first = self.scheduler._running[0]
        self.without_row = 0 if first.last_step == batch.serial else self.without_row + 1
        assert self.without_row <= 4 * limits.max_num_seqs + 4, "who is first starves"

    def assert_row(self, row: Row) -> None:
        seq = row.seq
        assert row.live
        assert row.lease.owner == seq.request.id
        assert 1 <= row.lease.in_flight <= self.limits.settle_lag + 1
        assert 0 <= row.want_drafts <= seq.num_drafts <= self.limits.k_max
        if row.kind is RowKind.PREFILL:
            end = row.start + row.num_fed
            assert row.tokens == tuple(seq.tokens[row.start : end])
            assert row.num_fed == len(row.tokens) >= 1
            assert row.emits is (end == len(seq.tokens))
            assert row.next_token == (-1 if row.emits else seq.tokens[end])
            assert row.emits or row.want_drafts == 0
            return
        assert row.kind is (RowKind.VERIFY if seq.num_drafts else RowKind.DECODE)
        assert (row.emits, row.tokens, row.start, row.next_token) == (True, (), -1, -1)
        assert row.num_fed == 1 + row.num_drafts
        assert row.num_drafts <= seq.num_drafts
        assert (row.drafts is not None) is self.device.host
        assert len(seq.tokens) < seq.max_total
        if self.device.host and seq.num_drafts:
            assert row.lease.in_flight == 1
            assert len(seq.tokens) + row.num_fed <= seq.max_total

    def assert_idle(self) -> None:
        self.ledger.check()
        assert (self.ledger.used_blocks, self.ledger.used_slots) == (0, 0)
        assert not self.flight
        assert all(asked.finish is not None for asked in self.asked.values())
        scheduler = self.scheduler
        assert not (scheduler._live or scheduler._running or scheduler._waiting or scheduler._ended)
        assert scheduler.schedule(self.now) is None
        stats = self.stats()
        assert (stats.running, stats.waiting_seqs, stats.waiting_kv, stats.waiting_state) == (0, 0, 0, 0)
        assert stats.tokens_emitted == self.num_heard


LAGS = pytest.mark.parametrize("lag", [0, 1])
HOSTS = pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
DRAFTS = pytest.mark.parametrize("k", [0, 1, 7])


def long_lived(count: int, start: int = 1, least: int = 20, tag: str = "l") -> list[str]:
    """Names of requests that do not stop early."""
    names = (f"{tag}{i}" for i in range(10_000))
    return [name for name, _ in zip((n for n in names if not stops(n, start, least)), range(count), strict=False)]


def stops(name: str, start: int, least: int) -> bool:
    return any(is_stop(name, position) for position in range(start, start + least))


def shape(batch: Batch | None) -> list[tuple[str, RowKind, int]]:
    assert batch is not None
    return [(row.seq.request.id, row.kind, row.num_fed) for row in batch.rows]


def sequence_of(world: World, name: str) -> Sequence:
    return world.scheduler._live[name]
