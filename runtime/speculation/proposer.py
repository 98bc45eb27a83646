"""What a drafter must be able to do. All of it is abstract: one that lacks a method cannot be constructed."""

from __future__ import annotations

import enum
from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.state.paged import PagedStore
from runtime.state.pool import StateTxn
from runtime.state.recurrent import SlotStore
from runtime.step import ForwardBatch, Verdict


class Placement(enum.Enum):
    """DEVICE proposers run before the read-back and never wait; HOST proposers need the tokens themselves."""

    DEVICE = "device"
    HOST = "host"


class HiddenNeed(enum.Enum):
    """Which hidden states of the target a proposer is fed with."""

    NONE = "none"
    FINAL = "final"


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Chains: tokens [R, k] int64 on the proposer's side (device or CPU); lengths: drafts per row, on the host."""

    tokens: torch.Tensor
    lengths: tuple[int, ...]


class SpeculativeProposer(Protocol):
    """Suggests tokens. What it suggests may cost speed, never output: the target verifies every one."""

    name: str
    placement: Placement
    needs: HiddenNeed

    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of its own store, in bytes."""

    @abstractmethod
    def paged_stores(self) -> tuple[PagedStore, ...]:
        """Its KV in the target's block numbers, which the prefix cache shares and copies together with the target's."""

    @abstractmethod
    def slot_stores(self) -> tuple[SlotStore, ...]:
        """What it keeps by slot, and must find again when a sequence goes on from a checkpoint."""

    @abstractmethod
    def extend(self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict) -> None:
        """Brings the drafter's own state to exactly the tokens the verdict kept. Every step, all row kinds, k = 0 too.

        hidden [T, H]: the target's hidden states behind its final norm. Rows in `txn.restored` go on from a checkpoint;
        at every mark of a row, the slot stores' checkpoint rows are written.
        """

    @abstractmethod
    def propose(
        self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict, num_drafts: tuple[int, ...]
    ) -> Drafts:
        """Drafts for the step after this one: at most num_drafts[i] for row i. Leaves no trace in committed state."""
