"""The pool under any order of events, against counting in plain python: states, windows, KV and what attention sees."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.api import StateError
from runtime.plan import Batch, Heritage, Mark, Outcome, Row, RowKind, Sequence, StateLease
from runtime.state.host_tier import HostCheckpoint
from runtime.state.ledger import Shortage
from runtime.state.pool import StateTxn
from runtime.state.prefix import CacheSettings, Chain
from tests.runtime.toy import ATTENTION, RECURRENT, WIDTH, forward, toy_pool
from tests.support.engines import greedy
from tests.support.steps import verdict

K_MAX = 3
KINDS = (RowKind.PREFILL, RowKind.DECODE, RowKind.VERIFY)
HALVES = st.sampled_from(["snapshot", "replay"])
TOKEN = st.integers(1, 9)
HAPPENED: Counter[str] = Counter()


@dataclass(eq=False)
class Tenant:
    """`tokens` are in the state on the device, `settled` of them are known to the host; it means to feed `wanted`.

    `begun` once a step used the lease: before, nothing is in its slot, not even what it goes on from.
    """

    seq: Sequence
    lease: StateLease
    chain: Chain | None = None
    tokens: list[int] = field(default_factory=list)
    settled: int = 0
    wanted: list[int] = field(default_factory=list)
    begun: bool = False


@dataclass(eq=False)
class Step:
    txn: StateTxn
    tenants: list[Tenant]
    rows: list[tuple[Row, list[int]]]
    kept: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Admit, begin, forward, commit or abort, settle late and out of order between leases, release at any moment.

    With a prefix cache: admitted texts begin like earlier ones, states are marked anywhere, leases leave theirs behind
    when they end (which is what preemption, forks and the next turn of a chat are made of), and everything is evicted
    for want of room in either pool, to host memory or for good.
    """

    @initialize(
        prefill=HALVES,
        decode=HALVES,
        mode=st.sampled_from(["decode", "prefill"]),
        checkpoints=st.sampled_from([3, 0, 1, 8]),
        host_bytes=st.sampled_from([0, 6, 40]),
    )
    def build(self, prefill: str, decode: str, mode: str, checkpoints: int, host_bytes: int) -> None:
        cache = CacheSettings(checkpoints, interval=4, host_bytes=host_bytes) if checkpoints else None
        self.pool = toy_pool(prefill, decode, mode, num_slots=4, num_blocks=14, block_size=2, k_max=K_MAX, cache=cache)
        self.cache = self.pool.ledger.cache
        self.texts: list[list[int]] = []
        self.tenants: list[Tenant] = []
        self.open: Step | None = None
        self.unsettled: list[Step] = []
        self.names = 0

    @rule(data=st.data(), size=st.integers(1, 12), salt=st.sampled_from(["", "", "", "a"]))
    def admit(self, data: st.DataObject, size: int, salt: str) -> None:
        """A text of its own, or one that begins like an earlier one: as it was, cut, or longer."""
        self.names += 1
        text = data.draw(st.lists(TOKEN, min_size=1, max_size=4))
        earlier = self.texts + [tenant.tokens for tenant in self.tenants]
        if earlier:
            begins = data.draw(st.sampled_from(earlier))
            text = begins[: data.draw(st.sampled_from([len(begins), len(begins), 8, 4, 3]))] + text
        chain = None if self.cache is None else self.cache.chain(salt)
        match = None if self.cache is None or chain is None else self.cache.match(chain, text)
        lease = self.pool.ledger.admit(f"t{self.names}", max(size, len(text)), match)
        if isinstance(lease, Shortage):
            return
        assert lease.origin < len(text)
        tenant = Tenant(Sequence(greedy(lease.owner, (1,), 1), [1], 0, 0.0), lease, chain)
        tenant.wanted, tenant.tokens, tenant.settled = text, text[: lease.origin], lease.origin
        self.tenants.append(tenant)
        if lease.restore is not None:
            HAPPENED["host hit" if isinstance(lease.restore.source, HostCheckpoint) else "hit"] += 1
        if self.open is None and data.draw(st.integers(0, 3)):
            self.compute(data, tenant)

    @precondition(lambda self: self.open is None and self.tenants)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.tenants), min_size=1, max_size=3, unique=True))
        planned: list[tuple[RowKind, Tenant, list[int]]] = []
        for tenant in chosen:
            kind = data.draw(st.sampled_from(KINDS if tenant.lease.bound else KINDS[:1]))
            most = {RowKind.PREFILL: 5, RowKind.DECODE: 1, RowKind.VERIFY: 1 + K_MAX}[kind]
            tokens = data.draw(st.lists(TOKEN, min_size=1, max_size=most))
            ahead = tenant.wanted[len(tenant.tokens) :]
            tokens = ahead[: len(tokens)] + tokens[len(ahead) :]  # the text it was admitted with comes first
            if self.pool.ledger.extend(tenant.lease, tenant.lease.bound + len(tokens)):
                planned.append((kind, tenant, tokens))
        if not planned:
            return
        planned.sort(key=lambda each: KINDS.index(each[0]))
        rows = [
            (Row(tenant.seq, tenant.lease, kind, len(fed), False, marks=self.marks(data, kind, len(fed))), fed)
            for kind, tenant, fed in planned
        ]
        txn = self.pool.begin(Batch(0, tuple(row for row, _ in rows)))
        for _, tenant, _ in planned:
            tenant.begun = True
        self.open = Step(txn, [tenant for _, tenant, _ in planned], rows)
        with pytest.raises(StateError):
            self.pool.begin(Batch(0, (rows[0][0],)))

    @precondition(lambda self: self.open is None and self.tenants)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        """One tenant computes all it was admitted with, and the step settles."""
        self.compute(data, data.draw(st.sampled_from(self.tenants)))

    def compute(self, data: st.DataObject, tenant: Tenant) -> None:
        ahead = tenant.wanted[len(tenant.tokens) :]
        if not ahead or any(tenant in step.tenants for step in self.unsettled):
            return
        marks = self.marks(data, RowKind.PREFILL, len(ahead))
        row = Row(tenant.seq, tenant.lease, RowKind.PREFILL, len(ahead), False, marks=marks)
        step = Step(self.pool.begin(Batch(0, (row,))), [tenant], [(row, ahead)], [len(ahead)])
        forward(step.txn, [ahead])
        self.pool.commit(step.txn, verdict(step.kept, [range(len(ahead))]))
        self.pool.settle(step.txn, Outcome((len(ahead),), ((),), (None,), (None,)))
        before, tenant.begun = [tenant.settled], True
        tenant.tokens += ahead
        tenant.settled += len(ahead)
        self.settle_marks(step, before)

    def marks(self, data: st.DataObject, kind: RowKind, num_fed: int) -> tuple[Mark, ...]:
        """States to keep: anywhere inside a prompt's chunk, or behind what a verification keeps."""
        if self.cache is None:
            return ()
        places = st.sets(st.integers(1, num_fed), max_size=3) if kind is RowKind.PREFILL else st.just({0})
        found = [
            Mark(offset, row, "interval") for offset in data.draw(places) if (row := self.cache.claim()) is not None
        ]
        return tuple(sorted(found, key=lambda mark: mark.offset))

    def settle_marks(self, step: Step, before: list[int]) -> None:
        for tenant, (row, _), start in zip(step.tenants, step.rows, before, strict=True):
            for mark in row.marks:
                assert self.cache is not None
                assert tenant.chain is not None
                if tenant.lease.closed or tenant.lease.closing:
                    self.cache.unclaim(mark.row)
                    continue
                n = start + mark.offset if mark.offset else tenant.settled
                self.cache.publish(tenant.chain, tenant.tokens, n, tenant.lease.blocks, mark.row, mark.trigger)

    @precondition(lambda self: self.open is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.open is not None
        step = self.open
        sums, means = forward(step.txn, [fed for _, fed in step.rows])
        for tenant, (_, fed), seen, mean in zip(step.tenants, step.rows, sums, means, strict=True):
            for i in range(len(fed)):
                text = tenant.tokens + fed[: i + 1]
                assert seen[i] == total(text)
                assert mean[i] == pytest.approx(sum(text) / len(text), abs=1e-4)
        self.check_states()  # a forward moves nothing
        step.kept = [
            len(fed) if row.kind is RowKind.PREFILL else data.draw(st.integers(1, len(fed))) for row, fed in step.rows
        ]
        self.pool.commit(step.txn, verdict(step.kept, [range(len(fed)) for _, fed in step.rows]))
        for tenant, (_, fed), kept in zip(step.tenants, step.rows, step.kept, strict=True):
            tenant.tokens += fed[:kept]
        self.open = None
        self.unsettled.append(step)

    @precondition(lambda self: self.open is not None)
    @rule(ran=st.booleans())
    def abort(self, ran: bool) -> None:
        assert self.open is not None
        if ran:
            forward(self.open.txn, [fed for _, fed in self.open.rows])
        self.pool.abort(self.open.txn)
        self.drop_marks(self.open)
        self.open = None

    def drop_marks(self, step: Step) -> None:
        for row, _ in step.rows:
            for mark in row.marks:
                assert self.cache is not None
                self.cache.unclaim(mark.row)

    @precondition(lambda self: self.unsettled)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(self.unsettled))
        earlier = self.unsettled[: self.unsettled.index(step)]
        nothing = (None,) * len(step.rows)
        outcome = Outcome(tuple(step.kept), ((),) * len(step.rows), nothing, nothing)
        if any(tenant in other.tenants for other in earlier for tenant in step.tenants):
            with pytest.raises(StateError, match="out of order"):
                self.pool.settle(step.txn, outcome)
            return
        self.pool.settle(step.txn, outcome)
        self.unsettled.remove(step)
        before = [tenant.settled for tenant in step.tenants]
        for tenant, kept in zip(step.tenants, step.kept, strict=True):
            tenant.settled += kept
        self.settle_marks(step, before)

    @precondition(lambda self: self.tenants)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Finish, abort and preemption are all this: a lease ends, perhaps with steps in flight."""
        tenant = data.draw(st.sampled_from(self.tenants))
        self.tenants.remove(tenant)
        self.texts = [*self.texts[-5:], list(tenant.tokens)]
        heritage = None
        if tenant.chain is not None and data.draw(st.integers(0, 3)):
            known = tuple(tenant.tokens[: len(tenant.tokens) - data.draw(st.sampled_from([0, 0, 0, 1, 3]))])
            heritage = Heritage(tenant.chain, known, data.draw(st.sampled_from(["end", "preemption"])))
        self.pool.release(tenant.lease, heritage)
        with pytest.raises(StateError):
            self.pool.release(tenant.lease)

    @precondition(lambda self: self.tenants)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.tenants), unique=True))
        self.pool.materialise([tenant.lease.slot for tenant in chosen if tenant.tokens and tenant.begun])
        if self.open is None:
            assert not any(self.pool.backend.has_pending(tenant.lease.slot) for tenant in chosen)

    @precondition(lambda self: self.cache is not None)
    @rule()
    def evict(self) -> None:
        """A row is wanted, and not used after all."""
        assert self.cache is not None
        row = self.cache.claim()
        if row is not None:
            self.cache.unclaim(row)

    @invariant()
    def check_states(self) -> None:
        for tenant in self.tenants:
            if not tenant.tokens or not tenant.begun:
                continue
            window, state = self.pool.peek(tenant.lease.slot)[RECURRENT]
            assert state.item() == total(tenant.tokens)
            assert window[0].tolist() == ([0] * WIDTH + tenant.tokens)[1 - WIDTH :]
            assert int(self.pool.lengths[tenant.lease.slot]) == len(tenant.tokens)
            assert tenant.lease.computed == tenant.settled
            assert tenant.lease.bound >= len(tenant.tokens)
            for side in self.pool.peek_kv(tenant.lease, ATTENTION):
                assert side.flatten().tolist() == tenant.tokens[: tenant.settled]

    @invariant()
    def books(self) -> None:
        self.pool.ledger.check()

    def teardown(self) -> None:
        if self.open is not None:
            self.pool.abort(self.open.txn)
            self.drop_marks(self.open)
        for step in self.unsettled:
            nothing = (None,) * len(step.rows)
            self.pool.settle(step.txn, Outcome(tuple(step.kept), ((),) * len(step.rows), nothing, nothing))
            self.drop_marks(step)
        for tenant in self.tenants:
            self.pool.release(tenant.lease)
        self.pool.sweep()
        assert not self.pool._written
        ledger = self.pool.ledger
        assert (ledger.free_slots, ledger.used_blocks) == (ledger.total_slots, 0)
        ledger.check()
        if self.cache is not None:
            HAPPENED["evictions"] += self.cache.evictions
            HAPPENED["evicted blocks"] += self.cache.evicted_blocks
        assert not any(self.pool.backend.has_pending(slot) for slot in range(4))
        for tensor in (*self.pool.recurrent.state.values(), *self.pool.recurrent.conv.values()):
            assert torch.isfinite(tensor[0]).all()  # slot 0 is nobody's, poison did not reach it


def total(tokens: list[int]) -> int:
    return sum(token * (place + 1) for place, token in enumerate(tokens))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def test_the_machine_hit_and_evicted() -> None:
    """Runs after it: what it is there for has happened, in both pools."""
    if HAPPENED:
        assert min(HAPPENED[name] for name in ("hit", "evictions", "evicted blocks")) > 0, HAPPENED
