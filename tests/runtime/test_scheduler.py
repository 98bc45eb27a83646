"""The scheduler against a fake device whose text is a pure function of request and position.

So whatever is preempted, cut, retried or late, every request must end with exactly the tokens it would get alone.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.api import (
    Accepted,
    ConfigError,
    Delta,
    EngineStats,
    FinishReason,
    Rejected,
    RejectReason,
    Request,
    SamplingParams,
    StateError,
    TokenLogprobs,
)
from runtime.plan import Batch, Outcome, Row, RowKind, Sequence, StateLease
from runtime.scheduler import Drafting, Limits, Scheduler
from runtime.state.ledger import Ledger

ORDER = [RowKind.PREFILL, RowKind.DECODE, RowKind.VERIFY]
WRONG = -5


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

    def add(self, name: str, length: int, max_tokens: int = 5, num_drafts: int | None = None) -> Accepted | Rejected:
        self.now += 1
        answer = self.scheduler.add(
            Request(
                id=name,
                prompt=prompt_of(name, length),
                sampling=SamplingParams(max_tokens=max_tokens),
                num_drafts=num_drafts,
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
            assert (delta.timing is not None) is (delta.finish is not None)
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
        oldest = next(name for name, asked in self.asked.items() if asked.finish is None)
        seen = oldest in {row.seq.request.id for row in batch.rows}
        self.without_row = 0 if seen else self.without_row + 1
        assert self.without_row <= 4 * limits.max_num_seqs + 4, "the oldest request starves"

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


# --- whole runs


@LAGS
@HOSTS
@DRAFTS
@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_everybody_gets_their_own_text(lag: int, host: bool, k: int, budget: int) -> None:
    world = World(lag=lag, host=host, k=k, budget=budget)
    for i, (length, max_tokens) in enumerate([(1, 1), (1, 9), (7, 1), (20, 30), (3, 16), (8, 2), (63, 5), (1, 100)]):
        assert isinstance(world.add(f"r{i}", min(length, world.scheduler.max_len - 1), max_tokens), Accepted)
    world.finish()


@LAGS
@HOSTS
@DRAFTS
def test_a_tiny_pool_serves_many_by_preempting(lag: int, host: bool, k: int) -> None:
    world = World(lag=lag, host=host, k=k, blocks=10 if k < 7 else 16, slots=3, max_len=32, num_seqs=3)
    for i in range(50):
        assert isinstance(world.add(f"r{i}", 1 + i % 12, 1 + i % 17), Accepted)
    world.finish()
    assert world.stats().preemptions_state == 0


@LAGS
@HOSTS
@DRAFTS
def test_preemption_happens_and_leaves_no_mark(lag: int, host: bool, k: int) -> None:
    blocks = {0: 16, 1: 17, 7: 28}[k]  # room for two at their start, not at their end
    world = World(lag=lag, host=host, k=k, blocks=blocks, block_size=2, max_len=30, slots=4)
    names = long_lived(4, start=2, least=28)
    for name in names:
        world.add(name, 2, 100)
    world.finish()
    assert [len(world.asked[name].tokens) for name in names] == [28] * 4
    assert world.stats().preemptions_kv > 0


@LAGS
def test_two_that_need_most_of_the_pool_both_finish(lag: int) -> None:
    world = World(lag=lag, blocks=10, block_size=4, max_len=40)
    world.add("a", 24)
    world.add("b", 24)
    world.step()
    assert (world.stats().running, world.stats().waiting_kv) == (1, 1)
    world.finish()


@LAGS
def test_one_slot_serves_many(lag: int) -> None:
    world = World(lag=lag, slots=1, blocks=8, max_len=32)
    for i in range(20):
        world.add(f"r{i}", 1 + i, 3)
    world.step()
    assert (world.stats().running, world.stats().waiting_state) == (1, 19)
    world.finish()


@LAGS
@HOSTS
@DRAFTS
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 9, 17])
def test_exactly_max_tokens_are_delivered(lag: int, host: bool, k: int, max_tokens: int) -> None:
    names = [f"m{i}" for i in range(200) if len(expected(f"m{i}", 3, 3 + max_tokens)[0]) == max_tokens][:3]
    world = World(lag=lag, host=host, k=k)
    for name in names:
        world.add(name, 3, max_tokens)
    world.finish()
    assert [len(world.asked[name].tokens) for name in names] == [max_tokens] * 3


# --- refusals


def reject(answer: Accepted | Rejected) -> Rejected:
    assert isinstance(answer, Rejected)
    return answer


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    world = World(max_len=16)
    answer = reject(world.add("a", 16))
    assert (answer.reason, answer.param, answer.code) == (RejectReason.TOO_LONG, "prompt", "context_length_exceeded")
    assert answer.message == "This model's maximum context length is 16 tokens, but the prompt holds 16 tokens."
    assert reject(world.add("b", 160)).reason is RejectReason.TOO_LONG
    assert isinstance(world.add("c", 15, 100), Accepted)
    assert world.asked["c"].max_total == 16
    world.finish()
    assert len(world.asked["c"].tokens) == 1


@DRAFTS
def test_what_can_never_fit_the_pool_is_refused(k: int) -> None:
    world = World(k=k, blocks=8, block_size=4, max_len=1000)
    assert world.scheduler.max_len == 32 - 2 * k
    answer = reject(world.add("a", 32 - 2 * k))
    assert (answer.reason, answer.code) == (RejectReason.TOO_LONG, "context_length_exceeded")
    assert isinstance(world.add("b", 31 - 2 * k, 100), Accepted)
    assert isinstance(world.add("c", 1, 1000), Accepted)
    world.finish()


def test_malformed_requests_are_refused() -> None:
    world = World()
    for answer, param in (
        (world.add("a", 0), "prompt"),
        (world.add("a", 1, 0), "max_tokens"),
        (world.add("a", 1, 1, -1), "num_drafts"),
    ):
        assert (reject(answer).reason, reject(answer).param) == (RejectReason.INVALID, param)
    assert not world.scheduler.has_work


def test_an_id_is_used_once_at_a_time() -> None:
    world = World()
    world.add("a", 1, 1)
    assert reject(world.add("a", 1)).reason is RejectReason.INVALID
    world.finish()
    assert isinstance(world.add("a", 1, 1), Accepted)
    world.finish()


def test_the_queue_is_bounded() -> None:
    world = World(queued=1, num_seqs=1)
    assert isinstance(world.add("a", 1, 9), Accepted)
    assert reject(world.add("b", 1)).reason is RejectReason.QUEUE_FULL
    world.step()
    assert isinstance(world.add("c", 1), Accepted)
    assert reject(world.add("d", 1)).reason is RejectReason.QUEUE_FULL
    assert world.stats().waiting_seqs == 1
    world.finish()


def test_draining_takes_nobody_and_finishes_the_rest() -> None:
    world = World()
    world.add("a", 3)
    world.scheduler.drain()
    assert reject(world.add("b", 1)).reason is RejectReason.DRAINING
    world.finish()


@pytest.mark.parametrize(
    "kwargs",
    [{"budget": 0}, {"num_seqs": 0}, {"queued": 0}, {"max_len": 1}, {"k": 8}, {"lag": 2}, {"blocks": 0}, {"slots": 0}],
)
def test_limits_that_cannot_work_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        World(**kwargs)


# --- what a batch holds


def shape(batch: Batch | None) -> list[tuple[str, RowKind, int]]:
    assert batch is not None
    return [(row.seq.request.id, row.kind, row.num_fed) for row in batch.rows]


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


# --- ends


def sequence_of(world: World, name: str) -> Sequence:
    return world.scheduler._live[name]


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


# --- broken contracts


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


def test_a_pool_drained_by_somebody_else_is_an_error_and_no_silent_wait() -> None:
    world = World(slots=1, blocks=8)
    world.add("a", 1)
    world.ledger.admit("stranger", 1)
    with pytest.raises(StateError, match="no progress"):
        world.scheduler.schedule(0.0)
    world = World(slots=2, blocks=8)
    world.add("a", 1, 30)
    world.step()
    world.ledger.admit("stranger", world.ledger.free_blocks * 4)
    with pytest.raises(StateError, match="alone"):
        for _ in range(9):
            world.step()


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


# --- anything in any order


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, steps, late settles, cancels and crashes in any order, in pools where almost nothing fits."""

    @initialize(
        lag=st.sampled_from([0, 1]),
        host=st.booleans(),
        k=st.sampled_from([0, 1, 2, 7]),
        spare=st.sampled_from([0, 1, 7]),
        budget=st.sampled_from([1, 2, 3, 8, 40]),
        num_seqs=st.integers(1, 4),
        slots=st.integers(1, 4),
        block_size=st.sampled_from([1, 2, 4]),
        room=st.integers(2, 30),
        max_len=st.integers(2, 40),
        queued=st.sampled_from([1, 3, 20]),
    )
    def start(self, k: int, spare: int, block_size: int, room: int, **kwargs: Any) -> None:
        k_max = min(7, k + spare)
        blocks = -(-(room + 2 * k_max) // block_size)
        self.world = World(k=k, k_max=k_max, block_size=block_size, blocks=blocks, **kwargs)
        self.count = 0

    @rule(
        length=st.integers(1, 12),
        max_tokens=st.sampled_from([1, 2, 3, 8, 20, 60]),
        num_drafts=st.sampled_from([None, None, 0, 1, 7]),
        bad=st.sampled_from(["", "", "", "!"]),
    )
    def add(self, length: int, max_tokens: int, num_drafts: int | None, bad: str) -> None:
        self.count += 1
        waiting = len(self.world.scheduler._waiting)
        answer = self.world.add(f"r{self.count}{bad}", length, max_tokens, num_drafts)
        if isinstance(answer, Rejected):
            too_long = length + 1 > self.world.scheduler.max_len
            assert answer.reason is (RejectReason.TOO_LONG if too_long else RejectReason.QUEUE_FULL)
            assert too_long or waiting >= self.world.limits.max_queued_requests

    @precondition(lambda self: len(self.world.flight) <= self.world.limits.settle_lag)
    @rule()
    def launch(self) -> None:
        self.world.launch()

    @precondition(lambda self: self.world.flight)
    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(choice=st.integers(0, 20), keep=st.integers(0, 5))
    def cancel(self, choice: int, keep: int) -> None:
        names = list(self.world.asked)
        if names:
            name = names[-1 - choice % len(names)]
            alive = self.world.asked[name].finish is None
            assert self.world.cancel(name, keep) is alive

    @precondition(lambda self: len(self.world.flight) <= self.world.limits.settle_lag)
    @rule(luck=st.integers(0, 3))
    def crash(self, luck: int) -> None:
        if luck == 0:
            self.world.fail()

    @invariant()
    def conserve(self) -> None:
        world = self.world
        world.ledger.check()
        running, waiting = world.scheduler._running, world.scheduler._waiting
        assert len(running) <= world.limits.max_num_seqs
        arrived = [seq.arrived for seq in [*running, *waiting]]
        assert arrived == sorted(arrived)
        assert all(seq.lease is not None and not seq.lease.closing for seq in running)
        assert all(seq.lease is None for seq in waiting)
        assert set(world.scheduler._live) == {seq.request.id for seq in [*running, *waiting]}

    def teardown(self) -> None:
        self.world.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
