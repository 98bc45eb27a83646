"""The only writer of committed state. Every step is begin -> forward -> commit | abort, later settle."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.api import ROW_KINDS, StateError
from runtime.attention.backend import AttentionBackend, AttentionPlan, Recurrence, StepContext, VerifyTicket
from runtime.attention.hybrid_linear import check_kept
from runtime.plan import Batch, Heritage, Outcome, Row, RowKind, StateLease
from runtime.state.copies import Copies
from runtime.state.ledger import Ledger
from runtime.state.moves import Freed, Saved
from runtime.state.paged import PagedStore
from runtime.state.recurrent import RecurrentStore
from runtime.step import StepPart, Verdict


class StateTxn(StepContext):
    """One open step: its parts, the plans of the backends that run them, and the layers' only way to state.

    `restored`: rows whose state was copied from the prefix cache for this step.
    """

    def __init__(
        self,
        serial: int,
        batch: Batch,
        backend: AttentionBackend,
        parts: tuple[StepPart, ...],
        slots: torch.Tensor,
        restored: tuple[int, ...],
    ) -> None:
        self.serial = serial
        self.batch = batch
        self.restored = restored
        self.parts = parts
        self.slots = slots
        self._backend = backend
        self._plans: tuple[AttentionPlan, ...] = tuple(backend.plan(part, serial) for part in parts)
        self.tickets: tuple[VerifyTicket, ...] = tuple(backend.ticket(plan, serial) for plan in self._plans)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Every part's rows on the backend that `select` names."""
        if len(self._plans) == 1:
            return self._backend.attend(layer, q, k, v, scale, self._plans[0])
        return torch.cat(
            [
                self._backend.attend(layer, q[p.part.tokens], k[p.part.tokens], v[p.part.tokens], scale, p)
                for p in self._plans
            ]
        )

    def mix(self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Every part's rows on the backend that `select` names."""
        if len(self._plans) == 1:
            return self._backend.mix(layer, recurrence, x, gates, self._plans[0])
        return torch.cat(
            [self._backend.mix(layer, recurrence, x[p.part.tokens], gates[p.part.tokens], p) for p in self._plans]
        )


@dataclass(slots=True)
class CommitCounts:
    """What the pool has done so far; verify rows by how much of their draft was kept. `rows` by their kind."""

    commits: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROW_KINDS, 0))
    full: int = 0
    partial: int = 0
    bonus_only: int = 0
    missing: int = 0
    aborted: int = 0


class StatePool:
    """Slots, blocks, lengths and recurrent states of all requests.

    `lengths` [slots] int64 lives on the device: committed tokens per slot, ahead of the host's `lease.computed` while
    steps are unsettled. `reserve_ahead`: positions behind the fed tokens that drafting may overwrite.
    `poison` (tests) overwrites what a lease leaves behind, so that a read of it cannot go unnoticed.
    """

    def __init__(
        self,
        ledger: Ledger,
        kv: PagedStore,
        recurrent: RecurrentStore,
        backend: AttentionBackend,
        *,
        max_blocks: int,
        reserve_ahead: int,
        device: torch.device,
        poison: float | None = None,
    ) -> None:
        self.ledger = ledger
        self.kv = kv
        self.recurrent = recurrent
        self.backend = backend
        self.copies = Copies(kv, recurrent, poison)
        self.counts = CommitCounts()
        self.lengths = torch.zeros(recurrent.num_slots, dtype=torch.long, device=device)
        self._table = torch.zeros(recurrent.num_slots, max_blocks, dtype=torch.long, device=device)
        self._written: dict[int, int] = {}
        self._reserve_ahead = reserve_ahead
        self._device = device
        self._poison = poison
        self._open: StateTxn | None = None
        self._left: list[int] = []
        self._unsettled: list[StateTxn] = []
        self._spoilt: set[int] = set()  # serials of leases whose state is not finite
        self._serial = 0

    # --- the step ---------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> StateTxn:
        """Opens the step: block tables, lengths, plans. Raises StateError while another step is open.

        Whatever it raises, no row has begun.
        """
        if self._open is not None:
            raise StateError("begin() while a step is still open: commit() or abort() it first")
        if not batch.rows:
            raise StateError("begin() of an empty batch")
        if len({row.lease.serial for row in batch.rows}) < len(batch.rows):
            raise StateError("two rows of one step feed the same lease")
        self._leave()
        begun: list[Row] = []
        restored: list[int] = []
        try:
            for i, row in enumerate(batch.rows):
                if row.kind is not RowKind.PREFILL and row.lease.bound == 0:
                    raise StateError(f"a {row.kind.value} row of {row.lease.owner!r} has no state to go on from")
                self.ledger.begin(row.lease, row.num_fed)
                begun.append(row)
                if self._enter(row):
                    restored.append(i)
            parts = self._parts(batch)
            self._serial += 1
            slots = torch.cat([part.slots for part in parts]) if len(parts) > 1 else parts[0].slots
            self._open = StateTxn(self._serial, batch, self.backend, parts, slots, tuple(restored))
        except BaseException:
            for row in begun:
                self.ledger.abort(row.lease, row.num_fed)
            raise
        return self._open

    def commit(self, txn: StateTxn, verdict: Verdict) -> None:
        """THE line: what the verdict kept becomes the committed state, for every row kind, all tickets or none.

        Device work only. Raises StateError on a step that is not the open one, or on a bad `kept` or path.
        """
        if txn is not self._open:
            raise StateError("commit() of a step that is not open: foreign, stale, or committed before")
        if len(txn.tickets) != len(txn.parts):
            self.counts.missing += len(txn.parts) - len(txn.tickets)
            raise StateError("a part of the step has no ticket; its state would stay behind")
        for part, ticket in zip(txn.parts, txn.tickets, strict=True):
            if ticket.serial != txn.serial:
                raise StateError(f"a ticket of step {ticket.serial} cannot settle step {txn.serial}")
            if ticket.rows != part.rows:
                raise StateError(f"a ticket of rows {ticket.rows} cannot settle rows {part.rows}")
            if self.backend.select(ticket.kind) is not ticket.backend:
                raise StateError(f"{ticket.backend.name!r} does not run {ticket.kind.value} rows here")
            check_kept(ticket, verdict.kept[ticket.rows], verdict.path[ticket.rows])
        for ticket in txn.tickets:
            self.counts.rows[ticket.kind.value] += len(ticket.fed)
            self.backend.update_mamba_state_after_mtp_verify(
                ticket, verdict.kept[ticket.rows], verdict.path[ticket.rows]
            )
        self._keep_marked(txn.batch)
        self.lengths[txn.slots] += verdict.kept
        self.counts.commits += 1
        self._open = None
        self._unsettled.append(txn)

    def abort(self, txn: StateTxn) -> None:
        """Drops all candidates; committed state is untouched. For any exception between begin and commit."""
        if txn is not self._open:
            raise StateError("abort() of a step that is not open")
        self._open = None
        self.counts.aborted += 1
        for row in txn.batch.rows:
            self.ledger.abort(row.lease, row.num_fed)
        self._leave()

    def abort_if_open(self, txn: StateTxn) -> None:
        """`abort`, unless the step was committed before the exception."""
        if txn is self._open:
            self.abort(txn)

    def settle(self, txn: StateTxn, outcome: Outcome) -> None:
        """The host half, in the order of a lease's commits: computed += kept; leases that ended are freed.

        Raises StateError (and counts a missing commit) for a step that was not committed or was settled before.
        """
        if txn not in self._unsettled:
            self.counts.missing += 1
            raise StateError("settle() of a step that was not committed")
        earlier = self._unsettled[: self._unsettled.index(txn)]
        mine = {row.lease.serial for row in txn.batch.rows}
        if any(row.lease.serial in mine for other in earlier for row in other.batch.rows):
            raise StateError("settle() out of order: an earlier step of the same lease is unsettled")
        self._unsettled.remove(txn)
        for row, kept, error in zip(txn.batch.rows, outcome.kept, outcome.errors, strict=True):
            if error is not None and not row.lease.closed:
                self._spoilt.add(row.lease.serial)
            self.ledger.settle(row.lease, row.num_fed, kept)
            if row.kind is RowKind.VERIFY and row.num_drafts > 0:
                self.counts.full += kept == row.num_fed
                self.counts.bonus_only += kept == 1
                self.counts.partial += 1 < kept < row.num_fed
        self._leave()

    def release(self, lease: StateLease, heritage: Heritage | None = None) -> None:
        """Ends a lease; with steps in flight, its slot and blocks come free when the last of them settles."""
        self.ledger.release(lease, heritage)
        self._leave()

    def sweep(self) -> list[int]:
        """Cleans up behind leases that ended; the slots they left since the last call."""
        self._leave()
        left, self._left = self._left, []
        return left

    def touch(self) -> None:
        """Makes the operating system hand over the memory of the pools now, not with the first request that needs it.

        For fresh pools only: everything in them is 0 before and after.
        """
        self.copies.clear_all()
        self.recurrent.clear()

    @property
    def num_tables(self) -> int:
        """Leases whose block tables are written."""
        return len(self._written)

    def is_sound(self) -> bool:
        """Whether the books balance and no step is open."""
        try:
            self.ledger.check()
        except StateError:
            return False
        return self._open is None

    # --- readers ----------------------------------------------------------------------------------------------------

    def materialise(self, slots: list[int]) -> None:
        """Folds pending inputs, for any reader that is not their owner's next forward."""
        self.backend.materialise(slots)

    def peek(self, slot: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Per recurrent layer copies of conv [C, width - 1] and state [heads, V, K] at the committed position."""
        return self.backend.peek(slot)

    def peek_kv(self, lease: StateLease, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of one attention layer's keys and values [computed, kv_heads, dim] of a settled lease."""
        index = torch.tensor(lease.blocks, device=self._device)
        keys = self.kv.keys[layer][index].flatten(0, 1)[: lease.computed]
        values = self.kv.values[layer][index].flatten(0, 1)[: lease.computed]
        return keys, values

    def table_of(self, slots: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Block table rows [n, blocks] of `slots`, wide enough for `num_tokens` positions."""
        return self._table[slots, : -(-num_tokens // self.kv.block_size)]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _enter(self, row: Row) -> bool:
        """Writes a row's block table, and what a lease goes on from before its first step; True for the latter."""
        lease = row.lease
        restored = False
        if lease.serial not in self._written:
            self._written[lease.serial] = 0
            self.lengths[lease.slot] = lease.origin
            self._table[lease.slot] = 0
            self.backend.forget(lease.slot)
            if lease.restore is not None:
                self.copies.restore(lease)
                restored = True
        known = self._written[lease.serial]
        if known < len(lease.blocks):
            self._table[lease.slot, known : len(lease.blocks)] = torch.tensor(lease.blocks[known:])
            self._written[lease.serial] = len(lease.blocks)
        owner = self.backend.select(row.kind)
        if self.backend.has_pending(lease.slot) and not owner.has_pending(lease.slot):
            self.backend.materialise([lease.slot])
        return restored

    def _leave(self) -> None:
        """Does the ledger's moves: states are saved and spilled before anything of theirs is written again."""
        for move in self.ledger.drain():
            if isinstance(move, Saved):
                self.backend.materialise([move.slot])
            if isinstance(move, Freed):
                self._left.append(move.slot)
                if self._written.pop(move.serial, None) is not None:
                    self.backend.forget(move.slot)
                    if self._poison is not None:
                        self.recurrent.fill([move.slot], self._poison)
                    elif move.serial in self._spoilt:
                        self.recurrent.fill([move.slot], 0.0)
                        self.copies.clear(move.blocks)
                self._spoilt.discard(move.serial)
            self.copies.do(move)

    def _keep_marked(self, batch: Batch) -> None:
        """States that become checkpoints behind the kept tokens. Those inside a prefill row the forward has written."""
        marked = [
            (row.lease.slot, mark.row) for row in batch.rows if row.kind is not RowKind.PREFILL for mark in row.marks
        ]
        if marked:
            slots = [slot for slot, _ in marked]
            self.backend.materialise(slots)
            self.copies.save(slots, [row for _, row in marked])

    def _parts(self, batch: Batch) -> tuple[StepPart, ...]:
        parts: list[StepPart] = []
        first = token = 0
        while first < len(batch.rows):
            kind = batch.rows[first].kind
            stop = first
            while stop < len(batch.rows) and batch.rows[stop].kind is kind:
                stop += 1
            part = self._part(batch.rows[first:stop], kind, first, token)
            if any(other.kind is kind for other in parts):
                raise StateError("rows of one kind must be neighbours")
            parts.append(part)
            first, token = stop, part.tokens.stop
        return tuple(parts)

    def _part(self, rows: tuple[Row, ...], kind: RowKind, first: int, token: int) -> StepPart:
        fed = tuple(row.num_fed for row in rows)
        slot_ids = tuple(row.lease.slot for row in rows)
        slots = torch.tensor(slot_ids, device=self._device)
        lengths = self.lengths[slots]
        total = sum(fed)
        starts = torch.tensor([0, *_running(fed)], device=self._device)
        if len(fed) == 1:
            positions = lengths + torch.arange(total, device=self._device)
        else:
            index = torch.repeat_interleave(
                torch.arange(len(fed), device=self._device), starts[1:] - starts[:-1], output_size=total
            )
            positions = lengths[index] + torch.arange(total, device=self._device) - starts[index]
        context = max(row.lease.bound for row in rows)
        return StepPart(
            kind=kind,
            rows=slice(first, first + len(rows)),
            tokens=slice(token, token + total),
            slots=slots,
            slot_ids=slot_ids,
            lengths=lengths,
            fed=fed,
            row_starts=starts,
            positions=positions,
            block_table=self.table_of(slots, context + self._reserve_ahead),
            max_context=context,
            marks=tuple(row.marks for row in rows) if kind is RowKind.PREFILL else (),
        )


def _running(counts: tuple[int, ...]) -> list[int]:
    out, total = [], 0
    for count in counts:
        total += count
        out.append(total)
    return out
