"""The replay strategy: the forward keeps only the fed tokens' small inputs; the owner's next forward folds them in.

The inputs lie in two halves per slot (rows of the batch move, slots do not). A forward reads the half that holds the
committed step's inputs, folds the kept ones into the state it loads anyway, and writes its own inputs to the other
half. One state read and one state write per step, whatever the draft length.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from kernels.causal_conv1d import conv_block, conv_window
from kernels.state_fold import fold
from runtime.attention.backend import Recurrence
from runtime.attention.linear import EndStates, LinearAttention, LinearPlan, Peeked, make_plan
from runtime.plan import RowKind
from runtime.state.recurrent import RecurrentStore
from runtime.step import StepPart


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """One layer's kept inputs, at row 2 * slot + half.

    x [2 * slots, T, channels], log_decay [.., T, heads], u [.., T, heads, V], k [.., T, groups, K]. count [slots]
    int64: how many tokens the committed position is ahead of the pool, in this layer; a layer sets it to 0 when it
    folds, so a step that fails half-way leaves every layer consistent.
    """

    x: torch.Tensor
    log_decay: torch.Tensor
    u: torch.Tensor
    k: torch.Tensor
    count: torch.Tensor


class ReplayLinear(LinearAttention):
    """Keeps inputs instead of states; folds up to the committed position and never beyond it."""

    def __init__(self, store: RecurrentStore, max_fed: int) -> None:
        self._store = store
        self._ends = EndStates(store)
        self._max_fed = max_fed
        self._pending: set[int] = set()
        self._folds = 0
        slots = store.num_slots
        device = next(iter(store.state.values())).device if store.state else torch.device("cpu")
        self._half = torch.zeros(slots, dtype=torch.long, device=device)
        self._path = torch.zeros(slots, max_fed, dtype=torch.long, device=device)
        self._inputs: dict[int, _Inputs] = {}
        for layer, s in store.shapes.items():
            lead = (2 * slots, max_fed)
            self._inputs[layer] = _Inputs(
                x=torch.zeros(*lead, s.conv_channels, device=device),
                log_decay=torch.zeros(*lead, s.heads, device=device),
                u=torch.zeros(*lead, s.heads, s.v_dim, device=device),
                k=torch.zeros(*lead, s.groups, s.k_dim, device=device),
                count=torch.zeros(slots, dtype=torch.long, device=device),
            )
        self._serial = -1
        self._used = 0

    def plan(self, part: StepPart, serial: int) -> LinearPlan:
        """A prefill reads the pool, so what is pending for its slots is folded first."""
        if serial != self._serial:
            self._serial, self._used = serial, 0
        plan = make_plan(part, self._used, serial)
        if part.kind is RowKind.PREFILL:
            self.materialise(part.slot_ids)
            self._used += len(part.fed)
            self._ends.reserve(self._used)
        return plan

    def mix(
        self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor, plan: LinearPlan
    ) -> torch.Tensor:
        """Loads the state at the committed position, stores it there, and keeps this step's inputs."""
        if plan.part.kind is RowKind.PREFILL:
            return self._ends.mix(layer, recurrence, x, gates, plan)
        outputs = []
        kept = self._inputs[layer]
        for tile in plan.tiles:
            rows = tile.rows
            slots = plan.part.slots[rows]
            conv, state = self._load(layer, slots)
            self._store.store(layer, slots, conv, state)
            kept.count[slots] = 0
            parents = None if plan.part.parents is None else plan.part.parents[rows, : tile.width]
            raw = tile.pad(x)
            mixed = conv_block(raw, conv, recurrence.conv_weight, recurrence.conv_bias, parents)
            y, updates = recurrence.block(mixed, tile.pad(gates), state, parents)
            target = 2 * slots + 1 - self._half[slots]
            width = tile.width
            kept.x[target, :width] = raw
            kept.log_decay[target, :width] = updates.log_decay
            kept.u[target, :width] = updates.u
            kept.k[target, :width] = updates.k
            outputs.append(tile.unpad(y))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        """Turns the halves and notes how many inputs, along which path, the committed position is ahead."""
        part = plan.part
        if part.kind is RowKind.PREFILL:
            self._ends.commit(plan)
            return
        slots = part.slots
        self._half[slots] = 1 - self._half[slots]
        width = min(path.shape[1], self._max_fed)
        self._path[slots, :width] = path[:, :width].long()
        for inputs in self._inputs.values():
            inputs.count[slots] = kept.long()
        self._pending.update(part.slot_ids)
        self._folds += len(part.fed)

    def materialise(self, slots: Seq[int]) -> None:
        """Folds now what the next forward would have folded."""
        due = [slot for slot in slots if slot in self._pending]
        if not due:
            return
        index = torch.tensor(due, device=self._half.device)
        for layer, inputs in self._inputs.items():
            conv, state = self._load(layer, index)
            self._store.store(layer, index, conv, state)
            inputs.count[index] = 0
        self._pending.difference_update(due)

    def has_pending(self, slot: int) -> bool:
        """Whether a commit since the last fold concerned this slot."""
        return slot in self._pending

    def num_folds(self) -> int:
        """Commits so far, by rows."""
        return self._folds

    def forget(self, slot: int) -> None:
        """The slot changes hands: its inputs must not reach the next owner."""
        self._pending.discard(slot)
        for inputs in self._inputs.values():
            inputs.count[slot] = 0

    def peek(self, layer: int, slot: int) -> Peeked:
        """Folds into copies."""
        conv, state = self._load(layer, torch.tensor([slot], device=self._half.device))
        return Peeked(conv[0], state[0])

    def _load(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Conv and state of `slots` at the committed position, as copies."""
        conv, state = self._store.load(layer, slots, None)
        inputs = self._inputs[layer]
        source = 2 * slots + self._half[slots]
        path, count = self._path[slots], inputs.count[slots]
        conv = conv_window(inputs.x[source], conv, path, count)
        state = fold(state, inputs.log_decay[source], inputs.u[source], inputs.k[source], path, count)
        return conv, state
