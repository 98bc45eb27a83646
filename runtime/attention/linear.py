"""What a strategy for recurrent layers must be able to do, and what both strategies share: prefill's end states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.causal_conv1d import conv_block, conv_window
from runtime.api import StateError
from runtime.attention.backend import Recurrence
from runtime.attention.padding import Tile, tiles
from runtime.plan import Mark, RowKind
from runtime.state.recurrent import RecurrentStore
from runtime.step import StepPart


@dataclass(frozen=True, slots=True, eq=False)
class Peeked:
    """One layer's committed state, folded into copies: conv [C, width - 1], state [heads, V, K]."""

    conv: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LinearPlan:
    """fresh [n] bool or None: rows without an initial state (nothing computed yet).

    `first_row`: the first scratch row this part writes candidates to; parts of one step do not share rows.
    """

    part: StepPart
    tiles: tuple[Tile, ...]
    fresh: torch.Tensor | None
    first_row: int
    serial: int


class LinearAttention(Protocol):
    """Runs recurrent layers of one part and keeps candidates in a layout of its own."""

    @abstractmethod
    def plan(self, part: StepPart, serial: int) -> LinearPlan:
        """Prepares one part; makes room for its candidates."""

    @abstractmethod
    def mix(
        self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor, plan: LinearPlan
    ) -> torch.Tensor:
        """Raw x [t, channels], gates [t, heads, g] -> [t, heads, V]. Writes candidates; moves no committed state."""

    @abstractmethod
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        """Makes the candidate after node path[i, kept[i] - 1] row i's committed state."""

    @abstractmethod
    def materialise(self, slots: Seq[int]) -> None:
        """After this the pool alone holds the committed state of `slots`."""

    @abstractmethod
    def has_pending(self, slot: int) -> bool:
        """Whether the pool alone does not."""

    @abstractmethod
    def num_folds(self) -> int:
        """Rows committed by keeping inputs instead of a state."""

    @abstractmethod
    def reserve(self, num_rows: int, width: int, kinds: frozenset[RowKind]) -> None:
        """Allocates candidates for steps of `num_rows` rows of these kinds, up to `width` tokens in verified ones."""

    @abstractmethod
    def num_bytes(self) -> int:
        """Memory held for candidates and pending inputs, in bytes."""

    @abstractmethod
    def forget(self, slot: int) -> None:
        """Drops what is pending for a slot that changes hands."""

    @abstractmethod
    def peek(self, layer: int, slot: int) -> Peeked:
        """The committed state, folded into copies."""


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Memory of tensors, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fresh_rows(part: StepPart) -> torch.Tensor | None:
    """Rows that start from nothing. Decided by the committed length; only prefill can have one."""
    return part.lengths == 0 if part.kind is RowKind.PREFILL else None


class EndStates:
    """Candidates of prefill rows: the state after the last fed token, in one scratch row per batch row.

    States at a row's marks go straight to their checkpoint rows: those are claimed for this step, and nobody reads
    them before it has settled.
    """

    def __init__(self, store: RecurrentStore) -> None:
        self._store = store
        self._conv: dict[int, torch.Tensor] = {}
        self._state: dict[int, torch.Tensor] = {}
        self._capacity = 0

    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return bytes_of([*self._conv.values(), *self._state.values()])

    def reserve(self, num_rows: int) -> None:
        """Room for scratch rows 0..num_rows - 1; grows by doubling, never shrinks."""
        if num_rows <= self._capacity:
            return
        capacity = max(num_rows, 2 * self._capacity)
        for layer, conv in self._store.conv.items():
            self._conv[layer] = conv.new_empty(capacity, *conv.shape[1:])
            state = self._store.state[layer]
            self._state[layer] = state.new_empty(capacity, *state.shape[1:])
        self._capacity = capacity  # last, so that an allocation that failed is tried again

    def mix(
        self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor, plan: LinearPlan
    ) -> torch.Tensor:
        """Scans every row from its committed state (zero when fresh) and keeps the end states as candidates."""
        outputs = []
        for tile in plan.tiles:
            rows = tile.rows
            slots = plan.part.slots[rows]
            fresh = None if plan.fresh is None else plan.fresh[rows]
            conv, state = self._store.load(layer, slots, fresh)
            raw = tile.pad(x)
            mixed = conv_block(raw, conv, recurrence.conv_weight, recurrence.conv_bias, None)
            marks = plan.part.marks[rows]
            if any(marks):
                pieces = _pieces(plan.part.fed[rows], marks)
                y, end = self._scan_marked(layer, recurrence, mixed, tile.pad(gates), state, pieces)
                self._keep_windows(layer, raw, conv, marks)
            else:
                y, end = recurrence.scan(mixed, tile.pad(gates), state)
            scratch = slice(plan.first_row + rows.start, plan.first_row + rows.stop)
            self._conv[layer][scratch] = conv_window(raw, conv, None, tile.last + 1)
            self._state[layer][scratch] = end
            outputs.append(tile.unpad(y))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _scan_marked(
        self,
        layer: int,
        recurrence: Recurrence,
        mixed: torch.Tensor,
        gates: torch.Tensor,
        state: torch.Tensor,
        pieces: tuple[tuple[_Piece, ...], ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A scan of a rectangle that stops at every row's marks: outputs [n, T, heads, V] and end states."""
        state = state.clone()
        y: torch.Tensor | None = None
        for group in pieces:
            rows = torch.tensor([piece.row for piece in group], device=mixed.device)
            starts = torch.tensor([piece.start for piece in group], device=mixed.device)
            counts = torch.tensor([piece.stop - piece.start for piece in group], device=mixed.device)
            steps = torch.arange(max(piece.stop - piece.start for piece in group), device=mixed.device)
            inside = steps < counts[:, None]
            at = (starts[:, None] + steps).clamp(max=mixed.shape[1] - 1)
            own = gates[rows[:, None], at].masked_fill_(~inside[:, :, None, None], 0.0)
            out, ends = recurrence.scan(mixed[rows[:, None], at], own, state[rows])
            state[rows] = ends
            if y is None:
                y = out.new_zeros(*mixed.shape[:2], *out.shape[2:])
            y[rows[:, None].expand_as(at)[inside], at[inside]] = out[inside]
            kept = [(i, piece.saved_to) for i, piece in enumerate(group) if piece.saved_to is not None]
            if kept:
                self._store.saved_state[layer][[row for _, row in kept]] = ends[[i for i, _ in kept]]
        assert y is not None
        return y, state

    def _keep_windows(
        self, layer: int, raw: torch.Tensor, conv: torch.Tensor, marks: tuple[tuple[Mark, ...], ...]
    ) -> None:
        """The convolution's window at every mark."""
        rows = [i for i, each in enumerate(marks) for _ in each]
        counts = torch.tensor([mark.offset for each in marks for mark in each], device=raw.device)
        saved = self._store.saved_conv[layer]
        saved[[mark.row for each in marks for mark in each]] = conv_window(raw[rows], conv[rows], None, counts)

    def commit(self, plan: LinearPlan) -> None:
        """Copies the end states into the pool."""
        rows = slice(plan.first_row, plan.first_row + len(plan.part.fed))
        for layer, conv in self._conv.items():
            self._store.store(layer, plan.part.slots, conv[rows], self._state[layer][rows])


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens start..stop - 1 of a row; the state behind them goes to checkpoint row `saved_to`, if any."""

    row: int
    start: int
    stop: int
    saved_to: int | None


def _pieces(fed: Seq[int], marks: tuple[tuple[Mark, ...], ...]) -> tuple[tuple[_Piece, ...], ...]:
    """Every row cut at its marks: first all first pieces, then all second ones, and so on."""
    by_row = []
    for row, (count, mine) in enumerate(zip(fed, marks, strict=True)):
        start, cut = 0, []
        for mark in mine:
            if not start < mark.offset <= count:
                raise StateError(f"a mark at {mark.offset} of {count} tokens, behind {start}")
            cut.append(_Piece(row, start, mark.offset, mark.row))
            start = mark.offset
        if start < count:
            cut.append(_Piece(row, start, count, None))
        by_row.append(cut)
    deepest = max(len(cut) for cut in by_row)
    return tuple(tuple(cut[i] for cut in by_row if i < len(cut)) for i in range(deepest))


def make_plan(part: StepPart, first_row: int, serial: int) -> LinearPlan:
    """The part of a plan that every strategy needs."""
    return LinearPlan(part, tiles(part.fed, part.lengths.device), fresh_rows(part), first_row, serial)
