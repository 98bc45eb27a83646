"""The pool under any order of events, against counting in plain python: states, windows, KV and what attention sees."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.api import StateError
from runtime.plan import Batch, Outcome, Row, RowKind, Sequence, StateLease
from runtime.state.ledger import Shortage
from runtime.state.pool import StateTxn
from tests.runtime.toy import ATTENTION, RECURRENT, WIDTH, forward, toy_pool
from tests.support.engines import greedy
from tests.support.steps import verdict

K_MAX = 3
KINDS = (RowKind.PREFILL, RowKind.DECODE, RowKind.VERIFY)
HALVES = st.sampled_from(["snapshot", "replay"])
TOKEN = st.integers(1, 9)


@dataclass(eq=False)
class Tenant:
    """`tokens` are in the state on the device; `settled` of them are known to the host."""

    seq: Sequence
    lease: StateLease
    tokens: list[int] = field(default_factory=list)
    settled: int = 0


@dataclass(eq=False)
class Step:
    txn: StateTxn
    tenants: list[Tenant]
    rows: list[tuple[Row, list[int]]]
    kept: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Admit, begin, forward, commit or abort, settle late and out of order between leases, release at any moment."""

    @initialize(prefill=HALVES, decode=HALVES, mode=st.sampled_from(["decode", "prefill"]))
    def build(self, prefill: str, decode: str, mode: str) -> None:
        self.pool = toy_pool(prefill, decode, mode, num_slots=4, num_blocks=24, block_size=2, k_max=K_MAX)
        self.tenants: list[Tenant] = []
        self.open: Step | None = None
        self.unsettled: list[Step] = []
        self.names = 0

    @rule(size=st.integers(1, 12))
    def admit(self, size: int) -> None:
        self.names += 1
        lease = self.pool.ledger.admit(f"t{self.names}", size)
        if not isinstance(lease, Shortage):
            self.tenants.append(Tenant(Sequence(greedy(lease.owner, (1,), 1), [1], 0, 0.0), lease))

    @precondition(lambda self: self.open is None and self.tenants)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.tenants), min_size=1, max_size=3, unique=True))
        planned: list[tuple[RowKind, Tenant, list[int]]] = []
        for tenant in chosen:
            kind = data.draw(st.sampled_from(KINDS if tenant.lease.bound else KINDS[:1]))
            most = {RowKind.PREFILL: 5, RowKind.DECODE: 1, RowKind.VERIFY: 1 + K_MAX}[kind]
            tokens = data.draw(st.lists(TOKEN, min_size=1, max_size=most))
            if self.pool.ledger.extend(tenant.lease, tenant.lease.bound + len(tokens)):
                planned.append((kind, tenant, tokens))
        if not planned:
            return
        planned.sort(key=lambda each: KINDS.index(each[0]))
        rows = [(Row(tenant.seq, tenant.lease, kind, len(fed), False), fed) for kind, tenant, fed in planned]
        txn = self.pool.begin(Batch(0, tuple(row for row, _ in rows)))
        self.open = Step(txn, [tenant for _, tenant, _ in planned], rows)
        with pytest.raises(StateError):
            self.pool.begin(Batch(0, (rows[0][0],)))

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
        self.open = None

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
        for tenant, kept in zip(step.tenants, step.kept, strict=True):
            tenant.settled += kept

    @precondition(lambda self: self.tenants)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Finish, abort and preemption are all this: a lease ends, perhaps with steps in flight."""
        tenant = data.draw(st.sampled_from(self.tenants))
        self.tenants.remove(tenant)
        self.pool.release(tenant.lease)
        with pytest.raises(StateError):
            self.pool.release(tenant.lease)

    @precondition(lambda self: self.tenants)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.tenants), unique=True))
        self.pool.materialise([tenant.lease.slot for tenant in chosen if tenant.tokens])
        if self.open is None:
            assert not any(self.pool.backend.has_pending(tenant.lease.slot) for tenant in chosen)

    @invariant()
    def check_states(self) -> None:
        for tenant in self.tenants:
            if not tenant.tokens:
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
        for step in self.unsettled:
            nothing = (None,) * len(step.rows)
            self.pool.settle(step.txn, Outcome(tuple(step.kept), ((),) * len(step.rows), nothing, nothing))
        for tenant in self.tenants:
            self.pool.release(tenant.lease)
        self.pool.sweep()
        assert not self.pool._written
        ledger = self.pool.ledger
        assert (ledger.free_slots, ledger.free_blocks) == (ledger.total_slots, ledger.total_blocks)
        assert not any(self.pool.backend.has_pending(slot) for slot in range(4))
        for tensor in (*self.pool.recurrent.state.values(), *self.pool.recurrent.conv.values()):
            assert torch.isfinite(tensor[0]).all()  # slot 0 is nobody's, poison did not reach it


def total(tokens: list[int]) -> int:
    return sum(token * (place + 1) for place, token in enumerate(tokens))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
