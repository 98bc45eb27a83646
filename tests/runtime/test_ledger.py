"""Blocks and slots: all or nothing, nothing twice, nothing lost, nothing reused under a step in flight."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from runtime.api import StateError
from runtime.plan import StateLease
from runtime.state.ledger import Currency, Ledger, Shortage


def make(num_blocks: int = 9, block_size: int = 4, num_slots: int = 4, **kwargs: Any) -> Ledger:
    return Ledger(num_blocks=num_blocks, block_size=block_size, num_slots=num_slots, **kwargs)


def admit(ledger: Ledger, num_tokens: int, owner: str = "a") -> StateLease:
    lease = ledger.admit(owner, num_tokens)
    assert isinstance(lease, StateLease)
    return lease


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (32, 8)])
def test_admit_takes_a_slot_and_whole_blocks(num_tokens: int, blocks: int) -> None:
    ledger = make()
    lease = admit(ledger, num_tokens)
    assert (len(lease.blocks), ledger.used_blocks, ledger.free_blocks) == (blocks, blocks, 8 - blocks)
    assert (ledger.used_slots, ledger.free_slots) == (1, 2)
    assert lease.slot != 0
    assert 0 not in lease.blocks


def test_a_shortage_names_its_currency_and_takes_nothing() -> None:
    ledger = make()
    assert ledger.admit("a", 33) == Shortage(Currency.KV, 1)
    assert (ledger.used_blocks, ledger.used_slots) == (0, 0)
    for _ in range(3):
        admit(ledger, 4)
    assert ledger.admit("d", 4) == Shortage(Currency.STATE, 1)
    assert ledger.used_blocks == 3
    ledger.check()


def test_every_unit_but_the_padding_can_be_leased() -> None:
    ledger = make()
    leases = [admit(ledger, 8), admit(ledger, 20), admit(ledger, 4)]
    assert sorted(block for lease in leases for block in lease.blocks) == list(range(1, 9))
    assert sorted(lease.slot for lease in leases) == [1, 2, 3]


def test_a_pool_of_padding_alone_admits_nobody() -> None:
    ledger = make(num_blocks=1, num_slots=1)
    assert ledger.admit("a", 1) == Shortage(Currency.STATE, 1)
    assert make(num_blocks=1).admit("a", 1) == Shortage(Currency.KV, 1)
    ledger.check()


@pytest.mark.parametrize(("blocks", "size", "slots"), [(0, 4, 2), (2, 0, 2), (2, 4, 0)])
def test_impossible_sizes_are_refused(blocks: int, size: int, slots: int) -> None:
    with pytest.raises(StateError):
        make(blocks, size, slots)


def test_extend_is_all_or_nothing() -> None:
    ledger = make()
    lease, other = admit(ledger, 4), admit(ledger, 20, "b")
    assert ledger.extend(lease, 4)
    assert len(lease.blocks) == 1
    assert ledger.shortfall(lease, 16) == 1
    assert not ledger.extend(lease, 16)
    assert (len(lease.blocks), ledger.free_blocks) == (1, 2)
    assert ledger.shortfall(lease, 12) == 0
    assert ledger.extend(lease, 12)
    assert (len(lease.blocks), ledger.free_blocks) == (3, 0)
    ledger.release(other)
    assert ledger.extend(lease, 1)
    assert len(lease.blocks) == 3


def test_a_sequence_is_bounded_by_its_block_table() -> None:
    ledger = make(max_blocks_per_seq=2)
    assert ledger.max_tokens_per_seq == 8
    assert ledger.admit("a", 9) == Shortage(Currency.KV, 1)
    lease = admit(ledger, 8)
    assert not ledger.extend(lease, 9)
    assert make(max_blocks_per_seq=100).max_tokens_per_seq == 32


def test_lengths_follow_the_steps() -> None:
    ledger = make()
    lease = admit(ledger, 12)
    ledger.begin(lease, 5)
    ledger.begin(lease, 4)
    assert (lease.computed, lease.bound, lease.in_flight) == (0, 9, 2)
    ledger.settle(lease, 5, 5)
    assert (lease.computed, lease.bound, lease.in_flight) == (5, 9, 1)
    ledger.settle(lease, 4, 1)
    assert (lease.computed, lease.bound, lease.in_flight) == (6, 6, 0)
    ledger.begin(lease, 4)
    ledger.abort(lease, 4)
    assert (lease.computed, lease.bound, lease.in_flight) == (6, 6, 0)


@pytest.mark.parametrize("end", ["settle", "abort"])
def test_a_released_lease_is_kept_until_its_last_step_ends(end: str) -> None:
    ledger = make(num_slots=2)
    lease = admit(ledger, 8)
    ledger.begin(lease, 2)
    ledger.begin(lease, 2)
    ledger.release(lease)
    assert (lease.closing, lease.closed) == (True, False)
    assert ledger.closing_blocks == 2
    assert ledger.admit("b", 1) == Shortage(Currency.STATE, 1)
    ledger.settle(lease, 2, 2)
    assert ledger.drain() == []
    assert ledger.used_blocks == 2
    if end == "settle":
        ledger.settle(lease, 2, 1)
    else:
        ledger.abort(lease, 2)
    assert (lease.closing, lease.closed, ledger.closing_blocks) == (False, True, 0)
    [freed] = ledger.drain()
    assert (freed.serial, freed.slot, len(freed.blocks)) == (lease.serial, lease.slot, 2)
    assert ledger.drain() == []
    assert (ledger.used_blocks, ledger.used_slots) == (0, 0)


def test_a_lease_that_ended_is_of_no_use() -> None:
    ledger = make()
    lease = admit(ledger, 8)
    ledger.begin(lease, 1)
    ledger.release(lease)
    for use in (lambda: ledger.release(lease), lambda: ledger.begin(lease, 1), lambda: ledger.extend(lease, 1)):
        with pytest.raises(StateError, match="released before"):
            use()
    ledger.abort(lease, 1)
    for use in (
        lambda: ledger.release(lease),
        lambda: ledger.begin(lease, 1),
        lambda: ledger.extend(lease, 1),
        lambda: ledger.settle(lease, 1, 1),
        lambda: ledger.abort(lease, 1),
    ):
        with pytest.raises(StateError, match="closed before"):
            use()
    ledger.check()


def test_a_foreign_lease_is_refused() -> None:
    ledger, other = make(), make()
    admit(ledger, 4)
    stranger = admit(other, 4)
    for use in (lambda: ledger.release(stranger), lambda: ledger.begin(stranger, 1)):
        with pytest.raises(StateError, match="not of this ledger"):
            use()


def test_a_step_that_does_not_fit_is_refused() -> None:
    ledger = make()
    lease = admit(ledger, 8)
    for num_fed in (0, -1, 9):
        with pytest.raises(StateError):
            ledger.begin(lease, num_fed)
    ledger.begin(lease, 8)
    with pytest.raises(StateError):
        ledger.begin(lease, 1)
    for num_fed, kept in ((8, -1), (8, 9), (9, 9), (7, 7)):
        with pytest.raises(StateError):
            ledger.settle(lease, num_fed, kept)
    with pytest.raises(StateError):
        ledger.abort(lease, 7)
    assert (lease.computed, lease.bound, lease.in_flight) == (0, 8, 1)
    ledger.settle(lease, 8, 0)
    with pytest.raises(StateError):
        ledger.settle(lease, 1, 1)
    with pytest.raises(StateError):
        ledger.admit("b", -1)


@pytest.mark.parametrize("harm", ["leak", "twice", "padding", "slot", "length"])
def test_check_finds_harm(harm: str) -> None:
    ledger = make()
    lease, other = admit(ledger, 8), admit(ledger, 8, "b")
    ledger.check()
    if harm == "leak":
        lease.blocks.pop()
    elif harm == "twice":
        lease.blocks[0] = other.blocks[0]
    elif harm == "padding":
        lease.blocks[0] = 0
    elif harm == "slot":
        lease.slot = other.slot
    else:
        lease.computed = 1
    with pytest.raises(StateError):
        ledger.check()


def test_planning_imports_no_tensor_library() -> None:
    code = "import sys, runtime.scheduler; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'triton')))"
    subprocess.run([sys.executable, "-c", code], check=True)


class LedgerMachine(RuleBasedStateMachine):
    """Any order of calls. `held` is what the test believes each lease holds, from admission until it is closed."""

    leases: Bundle[StateLease] = Bundle("leases")

    @initialize(
        num_blocks=st.sampled_from([1, 2, 5, 9]), block_size=st.sampled_from([1, 2, 4]), num_slots=st.integers(1, 5)
    )
    def start(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.ledger = make(num_blocks, block_size, num_slots)
        self.num_blocks, self.num_slots = num_blocks, num_slots
        self.steps: dict[StateLease, list[int]] = {}
        self.ending: set[StateLease] = set()
        self.gone: set[StateLease] = set()
        self.serials: set[int] = set()
        self.freed: list[int] = []

    def is_open(self, lease: StateLease) -> bool:
        return lease not in self.ending and lease not in self.gone

    def ended(self, lease: StateLease) -> None:
        if lease in self.ending and not self.steps[lease]:
            self.ending.discard(lease)
            self.gone.add(lease)

    @rule(target=leases, num_tokens=st.sampled_from([0, 1, 2, 3, 5, 8, 40]))
    def admit(self, num_tokens: int) -> Any:
        blocks, slots = self.ledger.free_blocks, self.ledger.free_slots
        needed = self.ledger.blocks_for(num_tokens)
        lease = self.ledger.admit("owner", num_tokens)
        if isinstance(lease, Shortage):
            assert (self.ledger.free_blocks, self.ledger.free_slots) == (blocks, slots)
            assert slots == 0 if lease.currency is Currency.STATE else needed > blocks
            return multiple()
        assert lease.serial not in self.serials
        assert len(lease.blocks) == needed
        self.serials.add(lease.serial)
        self.steps[lease] = []
        return lease

    @rule(lease=leases, num_tokens=st.sampled_from([0, 1, 2, 4, 7, 16]))
    def extend(self, lease: StateLease, num_tokens: int) -> None:
        if not self.is_open(lease):
            with pytest.raises(StateError):
                self.ledger.extend(lease, num_tokens)
            return
        before, fits = list(lease.blocks), self.ledger.shortfall(lease, num_tokens) <= 0
        assert self.ledger.extend(lease, num_tokens) is fits
        assert lease.blocks[: len(before)] == before
        assert len(lease.blocks) == (max(len(before), self.ledger.blocks_for(num_tokens)) if fits else len(before))

    @rule(lease=leases, num_fed=st.integers(0, 4))
    def begin(self, lease: StateLease, num_fed: int) -> None:
        room = len(lease.blocks) * self.ledger.block_size - lease.bound
        if not self.is_open(lease) or not 1 <= num_fed <= room:
            with pytest.raises(StateError):
                self.ledger.begin(lease, num_fed)
            return
        self.ledger.begin(lease, num_fed)
        self.steps[lease].append(num_fed)

    @rule(lease=leases, share=st.floats(0, 1))
    def settle(self, lease: StateLease, share: float) -> None:
        if not self.steps[lease]:
            with pytest.raises(StateError):
                self.ledger.settle(lease, 1, 1)
            return
        num_fed, computed = self.steps[lease].pop(0), lease.computed
        kept = round(share * num_fed)
        self.ledger.settle(lease, num_fed, kept)
        assert lease.computed == computed + kept
        self.ended(lease)

    @rule(lease=leases)
    def abort(self, lease: StateLease) -> None:
        if not self.steps[lease]:
            with pytest.raises(StateError):
                self.ledger.abort(lease, 1)
            return
        computed = lease.computed
        self.ledger.abort(lease, self.steps[lease].pop())
        assert lease.computed == computed
        self.ended(lease)

    @rule(lease=leases)
    def release(self, lease: StateLease) -> None:
        if not self.is_open(lease):
            with pytest.raises(StateError):
                self.ledger.release(lease)
            return
        self.ledger.release(lease)
        self.ending.add(lease)
        self.ended(lease)

    @rule()
    def drain(self) -> None:
        self.freed += [freed.serial for freed in self.ledger.drain()]
        assert sorted(self.freed) == sorted(lease.serial for lease in self.gone)

    @invariant()
    def conserve(self) -> None:
        self.ledger.check()
        held = [lease for lease in self.steps if lease not in self.gone]
        blocks = [block for lease in held for block in lease.blocks]
        slots = [lease.slot for lease in held]
        assert len(set(blocks)) == len(blocks) == self.ledger.used_blocks
        assert len(set(slots)) == len(slots) == self.ledger.used_slots
        assert 0 not in blocks
        assert 0 not in slots
        assert self.ledger.used_blocks + self.ledger.free_blocks == self.num_blocks - 1
        assert self.ledger.used_slots + self.ledger.free_slots == self.num_slots - 1
        assert self.ledger.closing_blocks == sum(len(lease.blocks) for lease in self.ending)
        for lease in held:
            assert lease.in_flight == len(self.steps[lease])
            assert lease.bound == lease.computed + sum(self.steps[lease])
            assert (lease.closing, lease.closed) == (lease in self.ending, False)

    def teardown(self) -> None:
        for lease in [lease for lease in self.steps if lease not in self.gone]:
            if self.is_open(lease):
                self.ledger.release(lease)
            for num_fed in self.steps[lease]:
                self.ledger.settle(lease, num_fed, num_fed)
        self.ledger.check()
        assert (self.ledger.used_blocks, self.ledger.used_slots) == (0, 0)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
