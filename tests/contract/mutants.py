"""Commit strategies with one fault each, under the name of the strategy they spoil."""

from __future__ import annotations

import torch

from runtime.attention.linear import LinearPlan
from runtime.attention.replay import ReplayLinear
from runtime.attention.snapshot import SnapshotLinear
from runtime.plan import RowKind


class NoCommit(SnapshotLinear):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        if plan.part.kind is RowKind.PREFILL:
            super().commit(plan, kept, path)


class NoPrefillCommit(SnapshotLinear):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        if plan.part.kind is not RowKind.PREFILL:
            super().commit(plan, kept, path)


class OneTooMany(SnapshotLinear):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        more = torch.minimum(kept + 1, torch.tensor(plan.part.fed, dtype=kept.dtype))
        super().commit(plan, more, path)


class EverythingFed(SnapshotLinear):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        super().commit(plan, torch.tensor(plan.part.fed, dtype=kept.dtype), path)


class NoWindow(SnapshotLinear):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        before = {layer: conv.clone() for layer, conv in self._store.conv.items()}
        super().commit(plan, kept, path)
        for layer, conv in before.items():
            self._store.conv[layer].copy_(conv)


class NoVerifyWindow(NoWindow):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        if plan.part.kind is RowKind.VERIFY:
            super().commit(plan, kept, path)
        else:
            SnapshotLinear.commit(self, plan, kept, path)


class OneLayerForgotten(SnapshotLinear):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        last = max(self._store.conv)
        conv, state = self._store.conv[last].clone(), self._store.state[last].clone()
        super().commit(plan, kept, path)
        self._store.conv[last].copy_(conv)
        self._store.state[last].copy_(state)


class ReplayNoCommit(ReplayLinear):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        if plan.part.kind is RowKind.PREFILL:
            super().commit(plan, kept, path)


class ReplayEverythingFed(ReplayLinear):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        super().commit(plan, torch.tensor(plan.part.fed, dtype=kept.dtype), path)


class ReplayOldHalf(ReplayLinear):
    def commit(self, plan: LinearPlan, kept: torch.Tensor, path: torch.Tensor) -> None:
        super().commit(plan, kept, path)
        if plan.part.kind is not RowKind.PREFILL:
            self._half[plan.part.slots] = 1 - self._half[plan.part.slots]


class ReplayNoFold(ReplayLinear):
    """Counts the inputs, and drops them instead of folding."""

    def _load(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._store.load(layer, slots, None)


MUTANTS = {
    "snapshot": [
        NoCommit,
        NoPrefillCommit,
        OneTooMany,
        EverythingFed,
        NoWindow,
        NoVerifyWindow,
        OneLayerForgotten,
    ],
    "replay": [ReplayNoCommit, ReplayEverythingFed, ReplayOldHalf, ReplayNoFold],
}
