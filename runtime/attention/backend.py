"""The protocols of attention backends, and the ticket that ties a commit to the forward that wrote its candidates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.plan import RowKind
from runtime.step import StepPart


class Recurrence(Protocol):
    """One recurrent layer's arithmetic, without any state of its own (its weights are constants).

    Every kind Lockstep serves has the form ``S_t = exp(a_t) S_{t-1} + u_t k_t^T``, ``y_t = S_t q_t`` over a state
    S [heads, V, K] float32, behind a causal convolution with a window of the last `width - 1` raw inputs.
    All tensors are padded to [n rows, T]; padded tokens must be neutral (a = 0, u = 0).
    """

    @property
    @abstractmethod
    def conv_weight(self) -> torch.Tensor:
        """[channels, width]."""

    @property
    @abstractmethod
    def conv_bias(self) -> torch.Tensor | None:
        """[channels] or None."""

    @abstractmethod
    def scan(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefill: x [n, T, channels] after convolution and activation, gates [n, T, heads, g], state [n, heads, V, K].

        Returns outputs [n, T, heads, V] and the end states.
        """

    @abstractmethod
    def steps(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Snapshot verification: outputs [n, T, heads, V] and the state after each node [n, T, heads, V, K]."""

    @abstractmethod
    def block(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, StateUpdates]:
        """Verification, replay strategy: outputs [n, T, heads, V] and the small updates that make any of the states."""


@dataclass(frozen=True, slots=True, eq=False)
class StateUpdates:
    """What replay keeps per fed token: log_decay [n, T, heads], u [n, T, heads, V], k [n, T, groups, K]."""

    log_decay: torch.Tensor
    u: torch.Tensor
    k: torch.Tensor


class StepContext(Protocol):
    """What layers may do with state during a forward; the step's transaction gives it to the model."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Writes k, v [T, kv_heads, D] at the step's positions; causal attention [T, heads, D] of q, shaped alike."""

    @abstractmethod
    def mix(self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Mixes raw x [T, channels] with gates [T, heads, g] into [T, heads, V]. Writes candidates only."""


class AttentionPlan(Protocol):
    """Whatever a backend computes once per step and part; opaque to everyone else."""

    @property
    @abstractmethod
    def part(self) -> StepPart:
        """The rows it was made for."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifyTicket:
    """Says whose candidates a commit chooses from. Immutable, and good for one commit.

    `backend` is the very object that wrote the candidates; slots [n] int64; candidate_rows [n] int64 (row of the
    backend's own scratch); lengths [n] int64 (committed tokens before the step); fed: tokens fed per row; `serial` is
    the step's transaction.
    """

    serial: int
    backend: AttentionBackend
    kind: RowKind
    rows: slice
    slots: torch.Tensor
    candidate_rows: torch.Tensor
    lengths: torch.Tensor
    fed: tuple[int, ...]
    plan: AttentionPlan


class AttentionBackend(Protocol):
    """Runs attention and recurrence for the parts of a step, and commits what verification kept.

    Implementations subclass this protocol: a missing method cannot be constructed, and every signature is this one.
    """

    name: str

    @abstractmethod
    def select(self, kind: RowKind) -> AttentionBackend:
        """The backend that runs rows of `kind`: itself, unless it is a composite. The one selection rule."""

    @abstractmethod
    def plan(self, part: StepPart, serial: int) -> AttentionPlan:
        """Prepares one part of the step `serial`."""

    @abstractmethod
    def ticket(self, plan: AttentionPlan, serial: int) -> VerifyTicket:
        """The claim ticket for what the forward of `plan` wrote."""

    @abstractmethod
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, plan: AttentionPlan
    ) -> torch.Tensor:
        """`StepContext.attend` for one part."""

    @abstractmethod
    def mix(
        self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """`StepContext.mix` for one part. Reads states at the committed position; never moves one beyond it."""

    @abstractmethod
    def update_mamba_state_after_mtp_verify(self, ticket: VerifyTicket, kept: torch.Tensor, path: torch.Tensor) -> None:
        """Makes the state after node `path[i, kept[i] - 1]` the committed state of row i's slot, for every layer.

        kept [n] int32, 1 <= kept <= fed; path [n, >= max kept] int32, the fed node at each accepted depth. For a
        non-identity path the accepted KV moves to the front, too. Raises StateError on a ticket that is not its own,
        and (on the CPU) on a kept out of range, before anything is written.
        """

    @abstractmethod
    def materialise(self, slots: Seq[int]) -> None:
        """Folds pending inputs into the pool for these slots, so that any other reader finds the committed state."""

    @abstractmethod
    def peek(self, slot: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Per recurrent layer copies of conv [C, width - 1] and state [heads, V, K] at the committed position."""

    @abstractmethod
    def has_pending(self, slot: int) -> bool:
        """Whether the committed state of `slot` lives partly in this backend's pending inputs."""

    @abstractmethod
    def num_folds(self) -> int:
        """How many rows' inputs were left to be folded by a later reader, since start."""

    @abstractmethod
    def reserve(self, num_rows: int, width: int, kinds: frozenset[RowKind]) -> None:
        """Allocates candidates for steps of `num_rows` rows of these kinds, up to `width` tokens in verified ones."""

    @abstractmethod
    def num_bytes(self) -> int:
        """Memory held for candidates and pending inputs, in bytes."""

    @abstractmethod
    def forget(self, slot: int) -> None:
        """Drops pending inputs of a slot whose lease begins or ends."""
