"""The judge: which drafts stand, which tokens are new, who is done. On the device, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from runtime.api import StateError
from runtime.plan import RowKind
from runtime.sampling.logprobs import logprobs_of
from runtime.sampling.positions import Blocks, Positions
from runtime.sampling.sampler import sample
from runtime.sampling.store import Feature, SamplingStore
from runtime.sampling.upload import upload
from runtime.step import ForwardBatch, SampledLogprobs, Verdict


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """The positions of a step by batch row, n = the step's widest row; columns beyond a row's own are padding.

    targets, fed [R, n] int64 (sampled at, and fed at, each position); usable [R, n] bool: the logits were finite; first
    [R] int64: absolute position of the first sampled token; own [R, n] bool: no padding here, None when there is none.
    """

    targets: torch.Tensor
    fed: torch.Tensor
    usable: torch.Tensor
    first: torch.Tensor
    own: torch.Tensor | None


class Verifier:
    """Judges steps of at most 1 + k_max sampled positions per row; tensors of its verdicts are that wide."""

    def __init__(self, store: SamplingStore, k_max: int) -> None:
        self._store = store
        self._width = 1 + k_max
        self._depths = torch.arange(self._width, device=store.device)
        self._path = self._depths.to(torch.int32).unsqueeze(0)

    def judge(self, fb: ForwardBatch, logits: torch.Tensor) -> Verdict:
        """Logits [M, vocab] of `fb.sample_at` -> verdict. At every position the target is sampled with everything the
        request asks for; a draft stands while it equals the target before it. Without drafts this is plain sampling.
        """
        blocks = Blocks.of(fb.sample_starts)
        if blocks.width > self._width:
            raise StateError(f"a row has {blocks.width} positions to judge, the verifier was built for {self._width}")
        if blocks.width == 0:
            return self._verdict_of_chunks(fb)
        slots = [row.lease.slot for row in fb.batch.rows]
        features = self._store.features(slot for slot, num in zip(slots, blocks.num, strict=True) if num)
        logits = logits.float()
        if features:
            peaks = logits.amax(1)
            targets = self._targets(fb, logits, blocks, slots=slots, features=features)
        else:
            peaks, targets = logits.max(1)
        padded = None
        if blocks.width * len(slots) != blocks.total:
            padded = upload(blocks.padded(), logits.device)
        verdict = self._decide(fb, blocks, self._block(fb, blocks, targets, peaks.isfinite(), padded))
        if features & Feature.PENALTIES:
            valid = self._depths < verdict.num_emitted.unsqueeze(1)
            self._store.count(fb.slots, verdict.emitted, valid=valid)
        if features & Feature.LOGPROBS:
            found = self._logprobs(logits, targets, blocks=blocks, slots=slots, padded=padded)
            return replace(verdict, logprobs=found)
        return verdict

    def _targets(
        self, fb: ForwardBatch, logits: torch.Tensor, blocks: Blocks, *, slots: list[int], features: Feature
    ) -> torch.Tensor:
        """Targets [M] when some request asks for more than the argmax."""
        rows = blocks.rows()
        drawn = [m for m, row in enumerate(rows) if self._store.wants(slots[row], Feature.TEMPERATURE)]
        drafts = torch.empty((len(rows), 0), dtype=torch.int64, device=logits.device)
        if features & Feature.PENALTIES and blocks.width > 1:
            earlier = upload(blocks.earlier(), logits.device).view(-1, blocks.width - 1)
            fed = fb.tokens[fb.sample_at]
            drafts = torch.where(earlier >= 0, fed[earlier.clamp(min=0)], -1)
        at = Positions(
            slots=fb.slots[upload(rows, logits.device)],
            positions=fb.positions[fb.sample_at] + 1,
            drafts=drafts,
            max_top_k=self._store.max_top_k(slots),
        )
        return sample(logits, at, store=self._store, features=features, drawn=drawn)

    def _block(
        self, fb: ForwardBatch, blocks: Blocks, targets: torch.Tensor, usable: torch.Tensor, padded: torch.Tensor | None
    ) -> _Block:
        """The step by rows."""
        n = blocks.width
        fed, positions = fb.tokens, fb.positions
        if fed.shape[0] != blocks.total:
            fed, positions = fed[fb.sample_at], positions[fb.sample_at]
        if padded is None:
            return _Block(
                targets.view(-1, n), fed.view(-1, n), usable.view(-1, n), positions.view(-1, n)[:, 0] + 1, own=None
            )
        own = upload(blocks.num, targets.device).unsqueeze(1) > self._depths[:n]
        first = positions[padded.view(-1, n)[:, 0]] + 1
        return _Block(
            targets[padded].view(-1, n), fed[padded].view(-1, n), usable[padded].view(-1, n), first=first, own=own
        )

    def _decide(self, fb: ForwardBatch, blocks: Blocks, block: _Block) -> Verdict:
        """Accepts leading drafts equal to their targets and cuts at the first stop, else at the row's last position."""
        n = blocks.width
        targets = block.targets
        stops = self._store.stop_ids[fb.slots]
        room = self._store.max_total[fb.slots] - block.first
        stopped = (targets.unsqueeze(2) == stops.unsqueeze(1)).any(2)
        if n == 1:
            num = torch.ones_like(room)
            ended, failed = stopped[:, 0], ~block.usable[:, 0]
        else:
            go_on = (block.fed[:, 1:] == targets[:, :-1]) & ~stopped[:, :-1]
            go_on = go_on & (self._depths[1:n] < room.unsqueeze(1))
            if block.own is not None:
                go_on = go_on & block.own[:, 1:]
            num = go_on.cumprod(1).sum(1) + 1
            used = self._depths[:n] < num.unsqueeze(1)
            failed = (~block.usable & used).any(1)
            ended = stopped.gather(1, num.unsqueeze(1) - 1).squeeze(1)
        finish = torch.where(ended, 1, (num >= room).to(torch.int8) * 2)
        finish = torch.where(failed, 3, finish)
        num_emitted = num.masked_fill(failed, 0)
        kept = torch.where(failed, 1, num)
        if block.own is not None:
            silent = ~block.own[:, 0]
            finish = finish.masked_fill(silent, 0)
            num_emitted = num_emitted.masked_fill(silent, 0)
        if any(row.kind is RowKind.PREFILL for row in fb.batch.rows):
            kept = torch.where(self._is_prefill(fb), fb.fed, kept)
        emitted = targets.masked_fill(self._depths[:n] >= num_emitted.unsqueeze(1), 0)
        return Verdict(
            kept=kept.to(torch.int32),
            path=self._paths(len(blocks.num)),
            emitted=pad(emitted, (0, self._width - n)),
            num_emitted=num_emitted.to(torch.int32),
            finish=finish.to(torch.int8),
        )

    def _verdict_of_chunks(self, fb: ForwardBatch) -> Verdict:
        """When no row samples: all are prefill chunks and keep what they fed."""
        num_rows = len(fb.batch.rows)
        return Verdict(
            kept=fb.fed.to(torch.int32),
            path=self._paths(num_rows),
            emitted=torch.zeros((num_rows, self._width), dtype=torch.int64, device=fb.fed.device),
            num_emitted=torch.zeros(num_rows, dtype=torch.int32, device=fb.fed.device),
            finish=torch.zeros(num_rows, dtype=torch.int8, device=fb.fed.device),
        )

    def _is_prefill(self, fb: ForwardBatch) -> torch.Tensor:
        return upload([row.kind is RowKind.PREFILL for row in fb.batch.rows], fb.fed.device) > 0

    def _paths(self, num_rows: int) -> torch.Tensor:
        """The path of a chain for every row: one row of memory, and nobody writes it."""
        return self._path.expand(num_rows, -1)

    def _logprobs(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        blocks: Blocks,
        slots: list[int],
        padded: torch.Tensor | None,
    ) -> SampledLogprobs:
        """Of the rows that asked; zeros for the others, as behind a row's own positions."""
        asked = [m for m, row in enumerate(blocks.rows()) if self._store.wants(slots[row], Feature.LOGPROBS)]
        num_top = max(self._store.max_logprobs(slots), 1)
        index = upload(asked, logits.device)
        tables = []
        for found in logprobs_of(logits[index], targets[index], num_top=num_top):
            table = torch.zeros((blocks.total, *found.shape[1:]), dtype=found.dtype, device=found.device)
            table = table.index_copy(0, index, found)
            table = (table if padded is None else table[padded]).view(len(slots), blocks.width, *found.shape[1:])
            fill = (0, 0) * (found.ndim - 1) + (0, self._width - blocks.width)
            tables.append(pad(table, fill))
        return SampledLogprobs(chosen=tables[0], top_tokens=tables[1], top_values=tables[2])
