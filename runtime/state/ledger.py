"""Who holds which KV blocks and state slots: the host half of the state pool, in plain integers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from runtime.api import StateError
from runtime.plan import StateLease


class Currency(enum.Enum):
    """The two things a request needs: blocks for attention's KV, and one slot for recurrent state."""

    KV = "kv"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why `Ledger.admit` gave nothing: `missing` more units of `currency` would have been needed."""

    currency: Currency
    missing: int


@dataclass(frozen=True, slots=True)
class Freed:
    """What a closed lease held. Slot and blocks may have been handed out again already, but not used yet."""

    serial: int
    slot: int
    blocks: tuple[int, ...]


class Ledger:
    """Allocator of blocks `1..num_blocks-1` and slots `1..num_slots-1`; block 0 and slot 0 are padding.

    A lease is open, then perhaps closing (ended, but a step that uses it is not settled: nothing of it is reused), then
    closed. Every unit is free or in exactly one lease. Blocks grow with `extend` and stay until the lease ends; what a
    rejected draft reserved serves the next step.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, num_slots: int, max_blocks_per_seq: int | None = None
    ) -> None:
        if min(num_blocks, num_slots) < 1 or block_size < 1:
            raise StateError(f"no ledger of {num_blocks} blocks of {block_size} tokens and {num_slots} slots")
        self.block_size = block_size
        self.total_blocks = num_blocks - 1
        self.total_slots = num_slots - 1
        wanted = self.total_blocks if max_blocks_per_seq is None else max_blocks_per_seq
        self.max_blocks_per_seq = min(wanted, self.total_blocks)
        self._free_blocks = list(range(num_blocks - 1, 0, -1))
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._leases: dict[int, StateLease] = {}
        self._freed: list[Freed] = []
        self._next_serial = 1

    # --- counts

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free_blocks)

    @property
    def used_blocks(self) -> int:
        """Blocks in leases, closing ones included."""
        return self.total_blocks - self.free_blocks

    @property
    def free_slots(self) -> int:
        """Slots that can be handed out now."""
        return len(self._free_slots)

    @property
    def used_slots(self) -> int:
        """Slots in leases, closing ones included."""
        return self.total_slots - self.free_slots

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
        """Free blocks that `extend(lease, num_tokens)` lacks; 0 or less when it would succeed."""
        return self.blocks_for(num_tokens) - len(lease.blocks) - self.free_blocks

    # --- a lease's life

    def admit(self, owner: str, num_tokens: int) -> StateLease | Shortage:
        """One slot and the blocks of `num_tokens` tokens, or nothing and the currency that is short."""
        if num_tokens < 0:
            raise StateError(f"{owner} asks for {num_tokens} tokens")
        if not self._free_slots:
            return Shortage(Currency.STATE, 1)
        needed = self.blocks_for(num_tokens)
        missing = needed - min(self.free_blocks, self.max_blocks_per_seq)
        if missing > 0:
            return Shortage(Currency.KV, missing)
        lease = StateLease(self._next_serial, owner, self._free_slots.pop(), self._take_blocks(needed))
        self._next_serial += 1
        self._leases[lease.serial] = lease
        return lease

    def extend(self, lease: StateLease, num_tokens: int) -> bool:
        """Grows the lease to hold `num_tokens` tokens in all, or leaves it as it is and says False."""
        self._require_open(lease)
        missing = self.blocks_for(num_tokens) - len(lease.blocks)
        if missing <= 0:
            return True
        if missing > self.free_blocks or len(lease.blocks) + missing > self.max_blocks_per_seq:
            return False
        lease.blocks.extend(self._take_blocks(missing))
        return True

    def begin(self, lease: StateLease, num_fed: int) -> None:
        """A step that feeds `num_fed` tokens uses the lease from now on."""
        self._require_open(lease)
        if num_fed < 1 or self.blocks_for(lease.bound + num_fed) > len(lease.blocks):
            raise StateError(f"{lease.owner} has {len(lease.blocks)} blocks for {lease.bound} + {num_fed} tokens")
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

    def release(self, lease: StateLease) -> None:
        """Ends the lease: at once, or when its last step in flight settles."""
        self._require_open(lease)
        if lease.in_flight:
            lease.closing = True
        else:
            self._close(lease)

    def drain_freed(self) -> list[Freed]:
        """Leases closed since the last call, oldest first. The pool drains before every step that uses new leases."""
        freed, self._freed = self._freed, []
        return freed

    def check(self) -> None:
        """Raises unless free and leased units are together all units, none twice and none of them padding."""
        leased_blocks = [block for lease in self._leases.values() for block in lease.blocks]
        leased_slots = [lease.slot for lease in self._leases.values()]
        for name, held, total in (
            ("blocks", self._free_blocks + leased_blocks, self.total_blocks),
            ("slots", self._free_slots + leased_slots, self.total_slots),
        ):
            if sorted(held) != list(range(1, total + 1)):
                raise StateError(f"{name} leaked or were handed out twice: {len(held)} of {total} accounted for")
        for lease in self._leases.values():
            if lease.closed or not 0 <= lease.computed <= lease.bound or (lease.closing and not lease.in_flight):
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
        self._free_slots.append(lease.slot)
        self._freed.append(Freed(lease.serial, lease.slot, tuple(lease.blocks)))
        self._give_blocks(lease.blocks)
        lease.blocks = []

    def _take_blocks(self, count: int) -> list[int]:
        return [self._free_blocks.pop() for _ in range(count)]

    def _give_blocks(self, blocks: list[int]) -> None:
        self._free_blocks.extend(blocks)
