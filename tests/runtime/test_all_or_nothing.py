"""Allocation takes everything it needs, or leaves the books as they are: both currencies, cache and pins included."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.plan import Heritage, StateLease
from runtime.state.ledger import Currency, Ledger, Shortage
from runtime.state.prefix import CacheSettings

SIZE = 2


def books(ledger: Ledger) -> dict[str, Any]:
    """Everything that says who holds what."""
    blocks, cache = ledger._blocks, ledger.cache
    found = {
        "free blocks": sorted(blocks._free),
        "leased": list(blocks._leased),
        "cached": list(blocks._cached),
        "cached alone": blocks.num_cached,
        "slots": sorted(ledger._free_slots),
        "leases": {serial: list(lease.blocks) for serial, lease in ledger._leases.items()},
        "moves": list(ledger._moves),
    }
    if cache is not None:
        found["rows"] = (sorted(cache._free_rows), sorted(cache._claimed))
        found["checkpoints"] = {id(each): (each.pins, each.alive) for each in cache._checkpoints}
        found["evictions"] = (cache.evictions, cache.evicted_blocks)
    return found


class World:
    """A ledger in which texts of a tiny alphabet come, grow, end and are found again."""

    def __init__(self, blocks: int, slots: int, checkpoints: int, longest: int | None, seed: int) -> None:
        cache = CacheSettings(num_checkpoints=checkpoints, interval=4) if checkpoints else None
        self.ledger = Ledger(
            num_blocks=blocks + 1, block_size=SIZE, num_slots=slots + 1, max_blocks_per_seq=longest, cache=cache
        )
        self.dice = random.Random(seed)
        self.live: list[tuple[StateLease, list[int]]] = []
        self.refused = {Currency.KV: 0, Currency.STATE: 0}
        self.stunted = 0

    def step(self) -> None:
        """Anything."""
        what = self.dice.choice((self.admit, self.admit, self.extend, self.feed, self.end))
        what()
        self.ledger.check()
        if self.dice.random() < 0.3:
            self.ledger.drain()

    def admit(self) -> None:
        ledger, cache = self.ledger, self.ledger.cache
        text = [self.dice.randrange(2) for _ in range(self.dice.randrange(1, 14))]
        before = books(ledger)
        available, free_slots = ledger.free_blocks + ledger.cached_blocks, ledger.free_slots
        match = None if cache is None else cache.match(cache.chain(""), text)
        needed = len(text) + self.dice.randrange(6)
        lease = ledger.admit("x", needed, match)
        if isinstance(lease, Shortage):
            assert books(ledger) == before
            assert lease.missing >= 1
            self.refused[lease.currency] += 1
            return
        assert free_slots and ledger.free_slots == free_slots - 1
        assert len(lease.blocks) == ledger.blocks_for(needed)
        assert len(set(lease.blocks)) == len(lease.blocks)
        held = ledger.free_blocks + ledger.cached_blocks
        assert available - held <= len(lease.blocks) + 1, "at most its own blocks, and the tail that it copies"
        self.live.append((lease, text))

    def extend(self) -> None:
        if not self.live:
            return
        lease, _ = self.dice.choice(self.live)
        before, had = books(self.ledger), list(lease.blocks)
        wanted = lease.bound + self.dice.randrange(20)
        if self.ledger.extend(lease, wanted):
            assert lease.blocks[: len(had)] == had
            assert len(lease.blocks) == max(len(had), self.ledger.blocks_for(wanted))
        else:
            assert books(self.ledger) == before
            self.stunted += 1

    def feed(self) -> None:
        if not self.live:
            return
        lease, text = self.dice.choice(self.live)
        count = min(len(text) - lease.bound, len(lease.blocks) * SIZE - lease.bound)
        if count >= 1:
            self.ledger.begin(lease, count)
            self.ledger.settle(lease, count, self.dice.choice((count, count, self.dice.randrange(count + 1))))

    def end(self) -> None:
        if not self.live:
            return
        lease, text = self.live.pop(self.dice.randrange(len(self.live)))
        cache = self.ledger.cache
        keep = cache is not None and self.dice.random() < 0.7
        self.ledger.release(lease, Heritage(cache.chain(""), tuple(text), "end") if keep and cache else None)


@settings(max_examples=80, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    blocks=st.integers(1, 24),
    slots=st.integers(1, 5),
    checkpoints=st.sampled_from([0, 1, 3, 8]),
    longest=st.sampled_from([None, 1, 5]),
    seed=st.integers(0, 2**32),
)
def test_what_cannot_be_given_whole_changes_nothing(
    blocks: int, slots: int, checkpoints: int, longest: int | None, seed: int
) -> None:
    world = World(blocks, slots, checkpoints, longest, seed)
    for _ in range(80):
        world.step()
    while world.live:
        world.end()
    world.ledger.check()
    assert (world.ledger.used_blocks, world.ledger.free_slots) == (0, slots)


@pytest.mark.parametrize("checkpoints", [0, 1, 8])
def test_the_property_is_not_empty(checkpoints: int) -> None:
    """Both currencies run short, and growth does, in every kind of ledger."""
    world = World(10, 4, checkpoints, None, seed=5)
    narrow = World(40, 1, checkpoints, None, seed=6)
    for _ in range(2000):
        world.step()
        narrow.step()
    assert world.refused[Currency.KV] > 20
    assert narrow.refused[Currency.STATE] > 20
    assert world.stunted > 20
