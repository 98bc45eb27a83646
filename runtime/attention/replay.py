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
from runtime.attention.backend import Recurrence, StateUpdates
from runtime.attention.linear import EndStates, LinearAttention, LinearPlan, Peeked, bytes_of, make_plan
from runtime.plan import RowKind
from runtime.state.recurrent import RecurrentShape, RecurrentStore
from runtime.step import StepPart


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """One layer's kept inputs: `packed` [2 * slots, T, n], at row 2 * slot + half.

    A token's n values are x [channels], log_decay [heads], u [heads, V] and k [groups, K], side by side, so that one
    gather reads and one write keeps them. count [slots] int64: how many tokens the committed position is ahead of the
    pool, in this layer; a layer sets it to 0 when it folds, so a step that fails half-way leaves all layers consistent.
    """

    shape: RecurrentShape
    packed: torch.Tensor
    count: torch.Tensor

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, StateUpdates]:
        """Inputs [n, T, channels] and updates of the given rows."""
        s, flat = self.shape, self.packed[rows]
        lead = flat.shape[:2]
        x, log_decay, u, k = torch.split(flat, [s.conv_channels, s.heads, s.heads * s.v_dim, s.groups * s.k_dim], 2)
        return x, StateUpdates(log_decay, u.view(*lead, s.heads, s.v_dim), k.view(*lead, s.groups, s.k_dim))

    def keep(self, rows: torch.Tensor, x: torch.Tensor, updates: StateUpdates) -> None:
        """Writes the inputs of x.shape[1] tokens."""
        flat = torch.cat([x, updates.log_decay, updates.u.flatten(2), updates.k.flatten(2)], 2)
        self.packed[rows, : x.shape[1]] = flat


@dataclass(frozen=True, slots=True, eq=False)
class _ReplayPlan(LinearPlan):
    """source, target [n] int64: the rows of inputs to fold from and to write to; path [n, T] int64, None for chains."""

    source: torch.Tensor
    target: torch.Tensor
    path: torch.Tensor | None


class ReplayLinear(LinearAttention):
    """Keeps inputs instead of states; folds up to the committed position and never beyond it."""

    def __init__(self, store: RecurrentStore, max_fed: int) -> None:
        self._store = store
        self._ends = EndStates(store)
        self._max_fed = max_fed
        self._pending: set[int] = set()
        self._folds = 0
        self._branched: set[int] = set()
        slots = store.num_slots
        device = next(iter(store.state.values())).device if store.state else torch.device("cpu")
        self._half = torch.zeros(slots, dtype=torch.long, device=device)
        self._chain = torch.arange(max_fed, device=device)
        self._path = self._chain.repeat(slots, 1)
        self._inputs: dict[int, _Inputs] = {}
        for layer, s in store.shapes.items():
            values = s.conv_channels + s.heads + s.heads * s.v_dim + s.groups * s.k_dim
            self._inputs[layer] = _Inputs(
                shape=s,
                packed=torch.zeros(2 * slots, max_fed, values, device=device),
                count=torch.zeros(slots, dtype=torch.long, device=device),
            )
        self._serial = -1
        self._used = 0

    def plan(self, part: StepPart, serial: int) -> LinearPlan:
        """A prefill reads the pool, so what is pending for its slots is folded first."""
        if serial != self._serial:
            self._serial, self._used = serial, 0
        if part.kind is RowKind.PREFILL:
            self.materialise(part.slot_ids)
            plan = make_plan(part, self._used, serial)
            self._used += len(part.fed)
            self._ends.reserve(self._used)
            return plan
        plan = make_plan(part, 0, serial)
        source = 2 * part.slots + self._half[part.slots]
        target = 4 * part.slots + 1 - source
        path = self._path[part.slots] if self._branched.intersection(part.slot_ids) else None
        return _ReplayPlan(part, plan.tiles, plan.fresh, 0, serial, source, target, path)

    def mix(
        self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor, plan: LinearPlan
    ) -> torch.Tensor:
        """Loads the state at the committed position, stores it there, and keeps this step's inputs."""
        if plan.part.kind is RowKind.PREFILL:
            return self._ends.mix(layer, recurrence, x, gates, plan)
        assert isinstance(plan, _ReplayPlan)
        outputs = []
        inputs = self._inputs[layer]
        for tile in plan.tiles:
            rows = tile.rows
            slots = plan.part.slots[rows]
            path = None if plan.path is None else plan.path[rows]
            conv, state = self._fold(layer, slots, plan.source[rows], path)
            self._store.store(layer, slots, conv, state)
            inputs.count.index_fill_(0, slots, 0)
            parents = None if plan.part.parents is None else plan.part.parents[rows, : tile.width]
            raw = tile.pad(x)
            mixed = conv_block(raw, conv, recurrence.conv_weight, recurrence.conv_bias, parents)
            y, updates = recurrence.block(mixed, tile.pad(gates), state, parents)
            inputs.keep(plan.target[rows], raw, updates)
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
        self._note_path(part, path)
        count = kept.long()
        for inputs in self._inputs.values():
            inputs.count[slots] = count
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

    def reserve(self, num_rows: int, width: int, kinds: frozenset[RowKind]) -> None:
        """Inputs are there for every slot; only prefills need scratch."""
        if RowKind.PREFILL in kinds:
            self._ends.reserve(num_rows)

    def num_bytes(self) -> int:
        """The inputs of all slots, and the scratch of prefills."""
        return self._ends.num_bytes() + bytes_of(inputs.packed for inputs in self._inputs.values())

    def forget(self, slot: int) -> None:
        """The slot changes hands: its inputs must not reach the next owner."""
        self._pending.discard(slot)
        for inputs in self._inputs.values():
            inputs.count[slot] = 0

    def peek(self, layer: int, slot: int) -> Peeked:
        """Folds into copies."""
        conv, state = self._load(layer, torch.tensor([slot], device=self._half.device))
        return Peeked(conv[0], state[0])

    def _note_path(self, part: StepPart, path: torch.Tensor) -> None:
        """Trees fold along the accepted path. A chain's path is 0, 1, 2 ..., which the fold need not be told."""
        if part.parents is not None:
            width = min(path.shape[1], self._max_fed)
            self._path[part.slots, :width] = path[:, :width].long()
            self._branched.update(part.slot_ids)
        elif self._branched.intersection(part.slot_ids):
            self._path[part.slots] = self._chain
            self._branched.difference_update(part.slot_ids)

    def _load(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Conv and state of `slots` at the committed position, as copies."""
        return self._fold(layer, slots, 2 * slots + self._half[slots], self._path[slots])

    def _fold(
        self, layer: int, slots: torch.Tensor, source: torch.Tensor, path: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        conv, state = self._store.load(layer, slots, None)
        inputs = self._inputs[layer]
        count = inputs.count[slots]
        x, updates = inputs.unpack(source)
        conv = conv_window(x, conv, path, count)
        return conv, fold(state, updates.log_decay, updates.u, updates.k, path, count)
