"""The prefix cache's device half: copies between slots, checkpoint rows, KV blocks and host memory."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from runtime.api import StateError
from runtime.plan import StateLease
from runtime.state.host_tier import HostCheckpoint
from runtime.state.moves import Forgotten, Freed, Move, Saved, Spilled, Vacated
from runtime.state.paged import PagedStore
from runtime.state.recurrent import SlotStore

Saves = list[list[torch.Tensor]]  # by store


class Copies:
    """Does what the ledger decided, for every store that follows a sequence: the target's and the drafter's.

    `counts`: states copied, by kind. All device work is in the order of the calls.
    """

    def __init__(self, kv: PagedStore, recurrent: SlotStore, poison: float | None) -> None:
        self.counts = {"checkpoint": 0, "restore": 0, "to_host": 0, "from_host": 0}
        self._paged = [kv]
        self._slots = [recurrent]
        self._poison = poison
        self._host_blocks: dict[int, Saves] = {}
        self._host_rows: dict[int, Saves] = {}

    @property
    def num_host_bytes(self) -> int:
        """Host memory held, in bytes."""
        held = (*self._host_blocks.values(), *self._host_rows.values())
        return sum(t.numel() * t.element_size() for saves in held for store in saves for t in store)

    def attach(self, paged: Seq[PagedStore], slots: Seq[SlotStore]) -> None:
        """A drafter's stores, which follow the same blocks, slots and rows."""
        self._paged += paged
        self._slots += slots

    def save(self, slots: Seq[int], rows: Seq[int]) -> None:
        """The states of slots with nothing pending become checkpoint rows."""
        for store in self._slots:
            store.save(slots, rows)
        self.counts["checkpoint"] += len(rows)

    def clear_all(self) -> None:
        """All blocks become 0, also the drafter's."""
        for paged in self._paged:
            paged.clear()

    def clear(self, blocks: Seq[int]) -> None:
        """Nothing of what was in these blocks is left."""
        for paged in self._paged:
            paged.fill(list(blocks), 0.0)

    def do(self, move: Move) -> None:
        """One move that needs nothing of a slot's other data."""
        match move:
            case Saved(slot, row):
                self.save([slot], [row])
            case Freed():
                self._spoil(move.blocks, ())
            case Vacated():
                self._spoil(move.blocks, move.rows)
            case Spilled():
                for block, host_block in move.blocks:
                    self._host_blocks[host_block] = [store.take_out(block) for store in self._paged]
                self._host_rows[move.host_row] = [store.take_out(move.row) for store in self._slots]
                self.counts["to_host"] += 1
            case Forgotten():
                for block in move.blocks:
                    del self._host_blocks[block]
                for row in move.rows:
                    del self._host_rows[row]

    def restore(self, lease: StateLease) -> None:
        """What the lease goes on from, copied to its slot and to blocks of its own."""
        restore = lease.restore
        if restore is None:
            raise StateError(f"{lease.owner} goes on from nothing")
        source = restore.source
        if isinstance(source, HostCheckpoint):
            for host_block, index in restore.loads:
                for paged, saved in zip(self._paged, self._host_blocks[host_block], strict=True):
                    paged.put_in(lease.blocks[index], saved)
            for slots, saved in zip(self._slots, self._host_rows[source.row], strict=True):
                slots.put_in(lease.slot, saved)
            self.counts["from_host"] += 1
            return
        if restore.tail is None:
            raise StateError(f"{lease.owner} goes on from a checkpoint without a tail")
        for paged in self._paged:
            paged.copy([restore.tail], [lease.blocks[restore.index]])
        for slots in self._slots:
            slots.restore([source.row], [lease.slot])
        self.counts["restore"] += 1

    def _spoil(self, blocks: Seq[int], rows: Seq[int]) -> None:
        if self._poison is None:
            return
        if blocks:
            for paged in self._paged:
                paged.fill(list(blocks), self._poison)
        if rows:
            for slots in self._slots:
                slots.spoil(rows, self._poison)
