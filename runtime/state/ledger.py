"""Who holds which KV blocks and state slots: the host half of the state pool, in plain integers."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from runtime.api import StateError
from runtime.plan import Heritage, Restore, StateLease
from runtime.state.blocks import Blocks
from runtime.state.host_tier import HostCheckpoint
from runtime.state.moves import Freed, Move, Saved
from runtime.state.prefix import CacheSettings, Checkpoint, Match, PrefixCache


class Currency(enum.Enum):
    """The two things a request needs: blocks for attention's KV, and one slot for recurrent state."""

    KV = "kv"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why `Ledger.admit` gave nothing: `missing` more units of `currency` would have been needed."""

    currency: Currency
    missing: int


class Ledger:
    """Allocator of blocks `1..num_blocks-1` and slots `1..num_slots-1`; block 0 and slot 0 are padding.

    A lease is open, then perhaps closing (ended, but a step that uses it is not settled: nothing of it is reused), then
    closed. Every slot is free or in exactly one lease; every block is free, in leases, or cached. Blocks grow with
    `extend` and stay until the lease ends; what a rejected draft reserved serves the next step. `cache` is the prefix
    cache, None without one: room that only it holds counts as room.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_blocks_per_seq: int | None = None,
        cache: CacheSettings | None = None,
    ) -> None:
        if min(num_blocks, num_slots) < 1 or block_size < 1:
            raise StateError(f"no ledger of {num_blocks} blocks of {block_size} tokens and {num_slots} slots")
        self.block_size = block_size
        self.total_blocks = num_blocks - 1
        self.total_slots = num_slots - 1
        wanted = self.total_blocks if max_blocks_per_seq is None else max_blocks_per_seq
        self.max_blocks_per_seq = min(wanted, self.total_blocks)
        self._moves: list[Move] = []
        self._blocks = Blocks(num_blocks)
        self.cache = None if cache is None else PrefixCache(self._blocks, self._moves, block_size, cache)
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._leases: dict[int, StateLease] = {}
        self._next_serial = 1

    # --- counts

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds."""
        return self._blocks.num_free

    @property
    def cached_blocks(self) -> int:
        """Blocks that only the prefix cache holds: they can be handed out as well."""
        return self._blocks.num_cached

    @property
    def used_blocks(self) -> int:
        """Blocks in leases, closing ones included; shared ones count once."""
        return self.total_blocks - self._blocks.num_available

    @property
    def free_slots(self) -> int:
        """Slots that can be handed out now."""
        return len(self._free_slots)

    @property
    def used_slots(self) -> int:
        """Slots in leases, closing ones included."""
        return self.total_slots - self.free_slots

    @property
    def num_leases(self) -> int:
        """Leases that are not closed."""
        return len(self._leases)

    @property
    def closing_blocks(self) -> int:
        """Blocks that come back by themselves once the steps in flight settle."""
        return sum(len(lease.blocks) for lease in self._leases.values() if lease.closing)

    @property
    def max_tokens_per_seq(self) -> int:
        """Tokens one lease can hold when it is alone."""
        return self.max_blocks_per_seq * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def shortfall(self, lease: StateLease, num_tokens: int) -> int:
        """Blocks that `extend(lease, num_tokens)` lacks; 0 or less when it would succeed."""
        return self.blocks_for(num_tokens) - len(lease.blocks) - self._blocks.num_available

    # --- a lease's life

    def admit(self, owner: str, num_tokens: int, match: Match | None = None) -> StateLease | Shortage:
        """One slot and the blocks of `num_tokens` tokens, or nothing and the currency that is short.

        With a match, the lease goes on from the deepest cached state that leaves it room (`lease.origin` tokens).
        """
        if num_tokens < 0:
            raise StateError(f"{owner} asks for {num_tokens} tokens")
        if not self._free_slots:
            return Shortage(Currency.STATE, 1)
        needed = self.blocks_for(num_tokens)
        if needed > self.max_blocks_per_seq:
            return Shortage(Currency.KV, needed - self.max_blocks_per_seq)
        for option in () if match is None else match.options:
            assert match is not None
            lease = self._admit_from(owner, needed, match, option)
            if lease is not None:
                return lease
        if not self._make_room(needed):
            return Shortage(Currency.KV, needed - self._blocks.num_available)
        return self._open(owner, self._blocks.take(needed))

    def _admit_from(
        self, owner: str, needed: int, match: Match, source: Checkpoint | HostCheckpoint
    ) -> StateLease | None:
        """A lease that shares the full blocks before the source's tail, as far as they are on the device."""
        index = (source.num_tokens - 1) // self.block_size
        if needed <= index:
            raise StateError(f"{owner} asks for {needed} blocks, but {source.num_tokens} tokens are cached")
        shared = [node.block for node in match.nodes[:index]]
        restore = Restore(source, index, None)
        if isinstance(source, Checkpoint):
            restore.tail = source.block
        else:
            loads = [(source.blocks[i], i) for i in range(len(shared), index)]
            restore.loads = (*loads, (source.tail_block, index))
        self._pin(restore, shared)
        if not self._make_room(needed - len(shared)):
            for block in shared:
                self._blocks.give(block)
            self._unpin(restore)
            return None
        lease = self._open(owner, shared + self._blocks.take(needed - len(shared)))
        lease.restore = restore
        lease.origin = lease.computed = lease.bound = source.num_tokens
        return lease

    def _open(self, owner: str, blocks: list[int]) -> StateLease:
        lease = StateLease(self._next_serial, owner, self._free_slots.pop(), blocks)
        self._next_serial += 1
        self._leases[lease.serial] = lease
        return lease

    def extend(self, lease: StateLease, num_tokens: int) -> bool:
        """Grows the lease to hold `num_tokens` tokens in all, or leaves it as it is and says False."""
        self._require_open(lease)
        missing = self.blocks_for(num_tokens) - len(lease.blocks)
        if missing <= 0:
            return True
        if len(lease.blocks) + missing > self.max_blocks_per_seq or not self._make_room(missing):
            return False
        lease.blocks.extend(self._blocks.take(missing))
        return True

    def begin(self, lease: StateLease, num_fed: int) -> None:
        """A step that feeds `num_fed` tokens uses the lease from now on."""
        self._require_open(lease)
        if num_fed < 1 or self.blocks_for(lease.bound + num_fed) > len(lease.blocks):
            raise StateError(f"{lease.owner} has {len(lease.blocks)} blocks for {lease.bound} + {num_fed} tokens")
        if lease.restore is not None:
            self._unpin(lease.restore)
        lease.in_flight += 1
        lease.bound += num_fed

    def settle(self, lease: StateLease, num_fed: int, kept: int) -> None:
        """The step that fed `num_fed` tokens is over and `kept` of them are in the state."""
        if not 0 <= kept <= num_fed:
            raise StateError(f"{lease.owner} kept {kept} of {num_fed} fed tokens")
        self._end_step(lease, num_fed, kept)

    def abort(self, lease: StateLease, num_fed: int) -> None:
        """Takes `begin` back: none of the `num_fed` tokens is in the state."""
        self._end_step(lease, num_fed, 0)

    def release(self, lease: StateLease, heritage: Heritage | None = None) -> None:
        """Ends the lease: at once, or when its last step in flight settles. `heritage`: what the cache may keep."""
        self._require_open(lease)
        lease.heritage = heritage if self.cache is not None else None
        if lease.in_flight:
            lease.closing = True
        else:
            self._close(lease)

    def drain(self) -> list[Move]:
        """What is to be done with tensors since the last call, in this order; before every step that uses new leases.

        Nothing may be written to slots, blocks or rows between a move being decided here and being done.
        """
        moves = list(self._moves)
        self._moves.clear()
        return moves

    def check(self) -> None:
        """Raises unless free, cached and leased units are together all units, and none of them is padding."""
        leased = Counter(block for lease in self._leases.values() for block in lease.blocks)
        for lease in self._leases.values():
            if lease.restore is not None and lease.restore.pinned and lease.restore.tail is not None:
                leased[lease.restore.tail] += 1
        self._blocks.check(leased, Counter() if self.cache is None else self.cache.holdings())
        slots = self._free_slots + [lease.slot for lease in self._leases.values()]
        if sorted(slots) != list(range(1, self.total_slots + 1)):
            raise StateError(f"slots leaked or were handed out twice: {len(slots)} of {self.total_slots} accounted for")
        if self.cache is not None:
            self.cache.check()
        for lease in self._leases.values():
            if (
                lease.closed
                or not lease.origin <= lease.computed <= lease.bound
                or (lease.closing and not lease.in_flight)
            ):
                raise StateError(f"the lease of {lease.owner} is inconsistent: {lease}")

    # --- inside

    def _require_known(self, lease: StateLease) -> None:
        if lease.closed or self._leases.get(lease.serial) is not lease:
            state = "was closed before" if lease.closed else "is not of this ledger"
            raise StateError(f"lease {lease.serial} of {lease.owner} {state}")

    def _require_open(self, lease: StateLease) -> None:
        self._require_known(lease)
        if lease.closing:
            raise StateError(f"lease {lease.serial} of {lease.owner} was released before")

    def _end_step(self, lease: StateLease, num_fed: int, kept: int) -> None:
        self._require_known(lease)
        unsettled = lease.bound - lease.computed - num_fed
        if lease.in_flight < 1 or unsettled < 0 or (lease.in_flight == 1 and unsettled != 0):
            raise StateError(f"{lease.owner} ends a step of {num_fed} tokens that was not begun")
        lease.in_flight -= 1
        lease.computed += kept
        lease.bound -= num_fed - kept
        if lease.closing and not lease.in_flight:
            self._close(lease)

    def _close(self, lease: StateLease) -> None:
        lease.closed, lease.closing = True, False
        del self._leases[lease.serial]
        if lease.restore is not None:
            self._unpin(lease.restore)
        if lease.heritage is not None:
            self._inherit(lease, lease.heritage)
        self._free_slots.append(lease.slot)
        for block in lease.blocks:
            self._blocks.give(block)
        self._moves.append(Freed(lease.serial, lease.slot, self._blocks.drain_vacated()))
        lease.blocks = []

    def _inherit(self, lease: StateLease, heritage: Heritage) -> None:
        """The state in the slot becomes a checkpoint, unless it is beyond the text that may be kept, or nothing new."""
        if self.cache is None or not lease.origin < lease.computed <= len(heritage.tokens):
            return
        row = self.cache.claim()
        if row is None:
            return
        found = self.cache.publish(heritage.chain, heritage.tokens, lease.computed, lease.blocks, row, heritage.trigger)
        if found is not None:
            self._moves.append(Saved(lease.slot, row))

    def _make_room(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, after evicting what the cache alone holds."""
        return num_blocks <= self._blocks.num_free or (self.cache is not None and self.cache.make_room(num_blocks))

    def _pin(self, restore: Restore, shared: list[int]) -> None:
        restore.source.pins += 1
        for block in shared:
            self._blocks.share(block)
        if restore.tail is not None:
            self._blocks.share(restore.tail)

    def _unpin(self, restore: Restore) -> None:
        """The copies are made, or will not be: what they were made of may be evicted."""
        if restore.pinned:
            restore.pinned = False
            restore.source.pins -= 1
            if restore.tail is not None:
                self._blocks.give(restore.tail)
