"""Anything in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.api import (
    Rejected,
    RejectReason,
)
from tests.support.scheduling import (
    World,
)


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
        queued_tokens=st.sampled_from([0, 0, 1, 9, 30]),
        prefill=st.sampled_from([0, 0, 1, 5]),
        aging=st.sampled_from([1, 10, 100]),
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
        priority=st.sampled_from([0, 0, 0, -1, 1, 100, -100]),
    )
    def add(self, length: int, max_tokens: int, num_drafts: int | None, bad: str, priority: int) -> None:
        self.count += 1
        limits, waiting = self.world.limits, list(self.world.scheduler._waiting)
        tokens = sum(len(seq.tokens) for seq in waiting) + length
        answer = self.world.add(f"r{self.count}{bad}", length, max_tokens, num_drafts, priority=priority)
        if isinstance(answer, Rejected):
            if length + 1 > self.world.scheduler.max_len:
                assert answer.reason is RejectReason.TOO_LONG
            elif answer.reason is RejectReason.QUEUE_TOKENS:
                assert waiting and 0 < limits.max_queued_tokens < tokens
            else:
                assert answer.reason is RejectReason.QUEUE_FULL
                assert len(waiting) >= limits.max_queued_requests
        elif waiting:
            assert not 0 < limits.max_queued_tokens < tokens
            assert len(waiting) < limits.max_queued_requests + limits.max_num_seqs

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
        for line in (running, list(waiting)):
            assert [seq.rank for seq in line] == sorted(seq.rank for seq in line)
        assert waiting.num_tokens == sum(len(seq.tokens) for seq in waiting)
        assert world.stats().stuck_requests == 0
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
