"""Runs the model over one open step: assembles its tokens, forwards, and keeps what the next step feeds."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from runtime.models.base import HybridModel
from runtime.plan import Row, RowKind
from runtime.state.pool import StateTxn
from runtime.step import ForwardBatch, Verdict


class ModelRunner:
    """Owns the model and `feed` [slots, 1 + k_max] int64: per slot the last emitted token and the drafts behind it.

    DECODE and VERIFY rows are fed from there, so a step can start before the host has seen the one before it.
    """

    def __init__(self, model: HybridModel, *, num_slots: int, k_max: int, device: torch.device) -> None:
        self.model = model
        self._feed = torch.zeros(num_slots, 1 + k_max, dtype=torch.long, device=device)
        self._device = device

    def prepare(self, txn: StateTxn) -> ForwardBatch:
        """The step's tensors, of an open transaction."""
        rows = txn.batch.rows
        tokens = [self._tokens(rows[part.rows], part.slots, part.fed) for part in txn.parts]
        fed = [row.num_fed for row in rows]
        starts, sample_at, sample_starts, at = [0], [], [0], 0
        for row in rows:
            if row.kind is RowKind.PREFILL:
                sample_at.extend([at + row.num_fed - 1] if row.emits else [])
            else:
                sample_at.extend(range(at, at + row.num_fed))
            at += row.num_fed
            starts.append(at)
            sample_starts.append(len(sample_at))
        return ForwardBatch(
            batch=txn.batch,
            parts=txn.parts,
            tokens=_joined(tokens),
            positions=_joined([part.positions for part in txn.parts]),
            slots=txn.slots,
            lengths=_joined([part.lengths for part in txn.parts]),
            fed=torch.tensor(fed, device=self._device),
            row_starts=torch.tensor(starts, device=self._device),
            sample_at=torch.tensor(sample_at, dtype=torch.long, device=self._device),
            sample_starts=tuple(sample_starts),
        )

    def forward(self, txn: StateTxn, fb: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, hidden] behind the final norm, and logits [M, vocab] float32 at `fb.sample_at`."""
        hidden = self.model.forward(fb.tokens, fb.positions, txn)
        wanted = hidden if fb.sample_at.shape[0] == hidden.shape[0] else hidden[fb.sample_at]
        return hidden, self.model.logits(wanted)

    def keep(self, fb: ForwardBatch, verdict: Verdict) -> None:
        """Notes the last emitted token of every row that emitted."""
        index = (verdict.num_emitted - 1).clamp(min=0).long()[:, None]
        last = verdict.emitted.gather(1, index)[:, 0]
        self._feed[fb.slots, 0] = torch.where(verdict.num_emitted > 0, last, self._feed[fb.slots, 0])

    def keep_drafts(self, fb: ForwardBatch, drafts: torch.Tensor) -> None:
        """Notes device drafts [R, k] for the next step."""
        self._feed[fb.slots, 1 : 1 + drafts.shape[1]] = drafts

    def seed(self, slot: int, token: int) -> None:
        """Sets what a DECODE or VERIFY row of `slot` feeds first (probes; requests get it from `keep`)."""
        self._feed[slot, 0] = token

    def _tokens(self, rows: Seq[Row], slots: torch.Tensor, fed: tuple[int, ...]) -> torch.Tensor:
        if rows[0].kind is RowKind.PREFILL:
            return torch.tensor([token for row in rows for token in row.tokens], device=self._device)
        width = max(fed)
        if any(row.drafts for row in rows):
            padded = [(*(row.drafts or ()), *[0] * (width - 1 - len(row.drafts or ()))) for row in rows]
            host = torch.tensor(padded, dtype=torch.long, device=self._device)
            told = torch.tensor([row.drafts is not None for row in rows], device=self._device)[:, None]
            self._feed[slots, 1:width] = torch.where(told, host, self._feed[slots, 1:width])
        rectangle = self._feed[slots, :width]
        if min(fed) == width:
            return rectangle.flatten()
        cells = [i * width + j for i, count in enumerate(fed) for j in range(count)]
        return rectangle.flatten()[torch.tensor(cells, device=self._device)]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
