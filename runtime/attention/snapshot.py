"""The snapshot strategy: the forward writes the state after every fed token to scratch, the commit gathers one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kernels.causal_conv1d import conv_block, conv_windows_all
from kernels.state_commit import gather_commit
from runtime.attention.backend import Recurrence
from runtime.attention.linear import EndStates, LinearAttention, LinearPlan, Peeked, bytes_of, make_plan
from runtime.plan import RowKind
from runtime.state.recurrent import RecurrentStore
from runtime.step import StepPart


class SnapshotLinear(LinearAttention):
    """Simple and strategy-free to read: the pool always holds the committed state. One state-sized write per token.

    Scratch: conv [rows, T, C, width - 1] and state [rows, T, heads, V, K] per layer; rows of one step's parts follow
    each other, so a mixed step needs no second scratch.
    """

    def __init__(self, store: RecurrentStore) -> None:
        self._store = store
        self._ends = EndStates(store)
        self._conv: dict[int, torch.Tensor] = {}
        self._state: dict[int, torch.Tensor] = {}
        self._rows = 0
        self._width = 0
        self._serial = -1
        self._used = 0

    def plan(self, part: StepPart, serial: int) -> LinearPlan:
        """Gives the part scratch rows of its own within the step."""
        if serial != self._serial:
            self._serial, self._used = serial, 0
        plan = make_plan(part, self._used, serial)
        self._used += len(part.fed)
        if part.kind is RowKind.PREFILL:
            self._ends.reserve(self._used)
        else:
            self._reserve(self._used, max(part.fed))
        return plan

    def mix(
        self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor, plan: LinearPlan
    ) -> torch.Tensor:
        """Reads the pool, writes scratch."""
        if plan.part.kind is RowKind.PREFILL:
            return self._ends.mix(layer, recurrence, x, gates, plan)
        outputs = []
        for tile in plan.tiles:
            rows = tile.rows
            conv, state = self._store.load(layer, plan.part.slots[rows], None)
            parents = None if plan.part.parents is None else plan.part.parents[rows, : tile.width]
            raw = tile.pad(x)
            mixed = conv_block(raw, conv, recurrence.conv_weight, recurrence.conv_bias, parents)
            y, states = recurrence.steps(mixed, tile.pad(gates), state, parents)
            scratch = slice(plan.first_row + rows.start, plan.first_row + rows.stop)
            self._conv[layer][scratch, : tile.width] = conv_windows_all(raw, conv, parents)
            self._state[layer][scratch, : tile.width] = states
            outputs.append(tile.unpad(y))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        """Gathers one candidate per row."""
        part = plan.part
        if part.kind is RowKind.PREFILL:
            self._ends.commit(plan)
            return
        nodes = path.gather(1, (kept - 1).long()[:, None])[:, 0].long()
        rows = torch.arange(plan.first_row, plan.first_row + len(part.fed), device=nodes.device)
        for layer, conv in self._store.conv.items():
            gather_commit(conv, self._conv[layer], part.slots, rows, nodes)
            gather_commit(self._store.state[layer], self._state[layer], part.slots, rows, nodes)

    def materialise(self, slots: Seq[int]) -> None:
        """Nothing is ever pending."""

    def has_pending(self, slot: int) -> bool:
        """Never."""
        return False

    def num_folds(self) -> int:
        """States are always written."""
        return 0

    def reserve(self, num_rows: int, width: int, kinds: frozenset[RowKind]) -> None:
        """Scratch of the largest step, so that none has to be made when memory may have become scarce."""
        if RowKind.PREFILL in kinds:
            self._ends.reserve(num_rows)
        if kinds - {RowKind.PREFILL}:
            self._reserve(num_rows, width if RowKind.VERIFY in kinds else 1)

    def num_bytes(self) -> int:
        """Scratch of all kinds."""
        return self._ends.num_bytes() + bytes_of([*self._conv.values(), *self._state.values()])

    def forget(self, slot: int) -> None:
        """Nothing to drop."""

    def peek(self, layer: int, slot: int) -> Peeked:
        """Copies of the pool's rows."""
        return Peeked(self._store.conv[layer][slot].clone(), self._store.state[layer][slot].clone())

    def _reserve(self, rows: int, width: int) -> None:
        if rows <= self._rows and width <= self._width:
            return
        # Parts planned earlier in this step have not run yet, so their scratch may still be replaced.
        rows, width = max(rows, self._rows), max(width, self._width)
        for layer, conv in self._store.conv.items():
            self._conv[layer] = conv.new_empty(rows, width, *conv.shape[1:])
            state = self._store.state[layer]
            self._state[layer] = state.new_empty(rows, width, *state.shape[1:])
        self._rows, self._width = rows, width  # last, so that an allocation that failed is tried again
