"""One complete half: softmax attention and recurrent layers, with their plans, slots and candidate layout."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from runtime.api import StateError
from runtime.attention.backend import AttentionBackend, AttentionPlan, Recurrence, VerifyTicket
from runtime.attention.full import FullAttention, FullPlan
from runtime.attention.linear import LinearAttention, LinearPlan
from runtime.plan import RowKind
from runtime.state.recurrent import RecurrentStore
from runtime.step import StepPart


@dataclass(frozen=True, slots=True, eq=False)
class HalfPlan:
    """Both plans of one part, and the half that made them."""

    part: StepPart
    serial: int
    owner: AttentionBackend
    full: FullPlan
    linear: LinearPlan


class HybridLinearAttnBackend(AttentionBackend):
    """`full` for attention layers, `linear` for recurrent ones. Owns everything its commit needs."""

    def __init__(self, name: str, store: RecurrentStore, full: FullAttention, linear: LinearAttention) -> None:
        self.name = name
        self._layers = tuple(store.shapes)
        self._full = full
        self._linear = linear
        self._serial = -1
        self._unsettled: set[HalfPlan] = set()

    def select(self, kind: RowKind) -> AttentionBackend:
        """A half runs every kind itself."""
        return self

    def plan(self, part: StepPart, serial: int) -> HalfPlan:
        """Plans one part for both kinds of layers. Tickets of earlier steps are void from here on."""
        if serial != self._serial:
            self._serial = serial
            self._unsettled.clear()
        plan = HalfPlan(part, serial, self, self._full.plan(part), self._linear.plan(part, serial))
        self._unsettled.add(plan)
        return plan

    def ticket(self, plan: AttentionPlan, serial: int) -> VerifyTicket:
        """Names this object as the writer of the candidates."""
        mine = self._own(plan)
        part = mine.part
        rows = torch.arange(len(part.fed), device=part.slots.device) + mine.linear.first_row
        return VerifyTicket(serial, self, part.kind, part.rows, part.slots, rows, part.lengths, part.fed, mine)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, plan: AttentionPlan
    ) -> torch.Tensor:
        """Softmax attention over paged KV."""
        return self._full.attend(layer, q, k, v, scale, self._own(plan).full)

    def mix(
        self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """The recurrence, by this half's strategy."""
        return self._linear.mix(layer, recurrence, x, gates, self._own(plan).linear)

    def update_mamba_state_after_mtp_verify(self, ticket: VerifyTicket, kept: torch.Tensor, path: torch.Tensor) -> None:
        """Commits the recurrent candidates and, for trees, moves the accepted KV to the front."""
        if ticket.backend is not self:
            raise StateError(f"a ticket of backend {ticket.backend.name!r} was handed to {self.name!r}")
        plan = self._own(ticket.plan)
        if plan not in self._unsettled:
            raise StateError(f"a ticket of step {ticket.serial} was handed to {self.name!r} twice, or too late")
        check_kept(ticket, kept, path)
        self._unsettled.remove(plan)
        self._linear.commit(plan.linear, kept, path)
        if plan.part.parents is not None:
            self._full.compact(plan.full, kept, path)

    def materialise(self, slots: Seq[int]) -> None:
        """See LinearAttention.materialise."""
        self._linear.materialise(slots)

    def peek(self, slot: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Copies of every recurrent layer's committed state."""
        out = {}
        for layer in self._layers:
            peeked = self._linear.peek(layer, slot)
            out[layer] = (peeked.conv, peeked.state)
        return out

    def has_pending(self, slot: int) -> bool:
        """See LinearAttention.has_pending."""
        return self._linear.has_pending(slot)

    def num_folds(self) -> int:
        """See LinearAttention.num_folds."""
        return self._linear.num_folds()

    def reserve(self, num_rows: int, width: int, kinds: frozenset[RowKind]) -> None:
        """See LinearAttention.reserve."""
        self._linear.reserve(num_rows, width, kinds)

    def num_bytes(self) -> int:
        """See LinearAttention.num_bytes."""
        return self._linear.num_bytes()

    def forget(self, slot: int) -> None:
        """See LinearAttention.forget."""
        self._linear.forget(slot)

    def _own(self, plan: AttentionPlan) -> HalfPlan:
        if not isinstance(plan, HalfPlan) or plan.owner is not self:
            raise StateError(f"backend {self.name!r} was handed a plan that is not its own")
        return plan


def check_kept(ticket: VerifyTicket, kept: torch.Tensor, path: torch.Tensor) -> None:
    """Raises StateError unless 1 <= kept <= fed, prefill keeps all, and every kept node was fed.

    On the CPU this costs nothing. On a device it waits for the verdict: as long as no commit kernel checks there and
    raises a flag, being right goes before not waiting.
    """
    for row, (count, fed, nodes) in enumerate(zip(kept.tolist(), ticket.fed, path.tolist(), strict=True)):
        if not 1 <= count <= fed:
            raise StateError(f"row {row}: kept {count} of {fed} fed tokens")
        if ticket.kind is RowKind.PREFILL:
            if count != fed:
                raise StateError(f"row {row}: a prefill row keeps all {fed} tokens it feeds, not {count}")
        elif len(nodes) < count or not all(0 <= node < fed for node in nodes[:count]):
            raise StateError(f"row {row}: path {nodes[:count]} names a node that was not fed (0..{fed - 1})")
        elif ticket.plan.part.parents is None and nodes[:count] != list(range(count)):
            raise StateError(f"row {row}: path {nodes[:count]} leaves the chain that was fed")
