"""The judge: which drafts stand, which tokens are new, who is done. On the device, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from runtime.api import StateError
from runtime.plan import RowKind
from runtime.sampling.logprobs import logprobs_of
from runtime.sampling.positions import Blocks, Positions
from runtime.sampling.ranking import argmax
from runtime.sampling.sampler import sample
from runtime.sampling.store import Feature, SamplingStore
from runtime.sampling.upload import upload
from runtime.step import ForwardBatch, SampledLogprobs, Verdict


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The judged positions by batch row, n = the step's widest row; columns beyond a row's own are padding.

    targets, fed [R, n] int64 (sampled at, and fed at, each position); usable [R, n] bool: the logits were finite; last
    [R] int64: absolute position of the first column's fed token; num [R] int64: how many columns are the row's own,
    None when all are.
    """

    targets: torch.Tensor
    fed: torch.Tensor
    usable: torch.Tensor
    last: torch.Tensor
    num: torch.Tensor | None


class Verifier:
    """Judges steps of at most 1 + k_max sampled positions per row; its verdicts' tensors are that wide."""

    def __init__(self, store: SamplingStore, k_max: int) -> None:
        self._store = store
        self._width = 1 + k_max
        self._depths = torch.arange(self._width, device=store.device)
        self._chains = self._depths.to(torch.int32).repeat(store.num_slots, 1)
        codes = torch.tensor([0, 1, 2, 3], dtype=torch.int8, device=store.device)
        self._goes_on, self._stop, self._length, self._failed = codes

    def judge(self, fb: ForwardBatch, logits: torch.Tensor) -> Verdict:
        """Logits [M, vocab] of `fb.sample_at` -> verdict.

        At every position the target is sampled with everything the request asks for; a draft stands while it equals
        the target before it. Without drafts this is plain sampling. Output counts of the penalties move here as well,
        so that the next step may be judged before the host has seen this one.
        """
        blocks = Blocks.of(fb.sample_starts)
        if blocks.width > self._width:
            raise StateError(f"a row has {blocks.width} positions to judge, the verifier was built for {self._width}")
        if blocks.width == 0:
            return self._keep_chunks(fb)
        slots = [row.lease.slot for row in fb.batch.rows]
        features = self._store.features(slot for slot, num in zip(slots, blocks.num, strict=True) if num)
        logits = logits.float()
        targets = self._targets(fb, logits, blocks, slots=slots, features=features) if features else argmax(logits)
        padded = None if blocks.uniform else upload(blocks.padded(), logits.device).view(len(slots), -1)
        verdict = self._decide(fb, self._table(fb, logits, targets, blocks=blocks, padded=padded))
        if Feature.PENALTIES in features:
            new = self._depths < verdict.num_emitted.unsqueeze(1)
            self._store.count(fb.slots, verdict.emitted, valid=new)
        if Feature.LOGPROBS in features:
            found = self._logprobs(logits, targets, blocks=blocks, slots=slots, padded=padded)
            return replace(verdict, logprobs=found)
        return verdict

    def screen(self, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict) -> Verdict:
        """The verdict, with chunks failed that left something behind that is not finite.

        Rows that sample are judged by their logits. A chunk has none, but its state, KV and checkpoints would be kept
        and read until its prompt ends. A state or KV that is not finite makes every later position so, and the last
        hidden state [T, hidden] of the chunk shows it.
        """
        silent = [row.kind is RowKind.PREFILL and not row.emits for row in fb.batch.rows]
        if not any(silent):
            return verdict
        finite = hidden.index_select(0, fb.row_starts[1:] - 1).abs().amax(1) < torch.inf
        spoiled = (upload(silent, hidden.device) > 0) > finite
        return replace(verdict, finish=torch.where(spoiled, self._failed, verdict.finish))

    def _targets(
        self, fb: ForwardBatch, logits: torch.Tensor, blocks: Blocks, *, slots: list[int], features: Feature
    ) -> torch.Tensor:
        """Targets [M] when some request asks for more than the argmax of the model's logits."""
        draws = [self._store.wants(slot, Feature.TEMPERATURE) for slot in slots]
        drawing = [slot for slot, draw in zip(slots, draws, strict=True) if draw]
        fed, positions = _fed(fb)
        drafts = fed.new_empty((blocks.total, 0))
        if Feature.PENALTIES in features and blocks.width > 1:
            earlier = upload(blocks.earlier(), logits.device).view(-1, blocks.width - 1)
            drafts = torch.where(earlier >= 0, fed[earlier.clamp(min=0)], -1)
        if blocks.uniform:
            row_slots = fb.slots if blocks.width == 1 else fb.slots.repeat_interleave(blocks.width)
        else:
            row_slots = fb.slots[upload(blocks.rows(), logits.device)]
        at = Positions(
            slots=row_slots,
            positions=positions + 1,
            drafts=drafts,
            max_top_k=self._store.max_top_k(drawing),
            all_top_k=all(self._store.wants(slot, Feature.TOP_K) for slot in drawing),
        )
        drawn = None if len(drawing) == len(slots) else [m for m, row in enumerate(blocks.rows()) if draws[row]]
        return sample(logits, at, store=self._store, features=features, drawn=drawn)

    def _table(
        self,
        fb: ForwardBatch,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        blocks: Blocks,
        padded: torch.Tensor | None,
    ) -> _Table:
        """The step by rows. `padded` [R, n] are the rows of logits to read, None when they lie that way already."""
        usable = logits.amax(1).abs() < torch.inf  # of NaN, of +inf and of nothing but -inf this is false
        fed, positions = _fed(fb)
        if padded is not None:
            num = upload(blocks.num, logits.device)
            return _Table(targets[padded], fed[padded], usable[padded], last=positions[padded[:, 0]], num=num)
        n = blocks.width
        last = positions.view(-1, n)[:, 0]
        return _Table(targets.view(-1, n), fed.view(-1, n), usable.view(-1, n), last=last, num=None)

    def _decide(self, fb: ForwardBatch, table: _Table) -> Verdict:
        """Accepts leading drafts equal to their targets; cuts at the first stop and at the last allowed position."""
        num_rows, n = table.targets.shape
        ends = self._store.ends.index_select(0, fb.slots)
        room = ends[:, 0] - table.last
        stops = (table.targets.unsqueeze(2) == ends[:, 1:].unsqueeze(1)).any(2)
        if n == 1:
            num = torch.ones_like(room)
            stopped, failed = stops[:, 0], ~table.usable[:, 0]
        else:
            go_on = (table.fed[:, 1:] == table.targets[:, :-1]) > stops[:, :-1]
            go_on &= self._depths[1:n] < room.unsqueeze(1)
            if table.num is not None:
                go_on &= self._depths[1:n] < table.num.unsqueeze(1)
            num = go_on.cumprod(1).sum(1) + 1
            used = self._depths[:n] < num.unsqueeze(1)
            stopped, failed = (stops & used).any(1), (used > table.usable).any(1)
        finish = torch.where(num >= room, self._length, self._goes_on)
        finish = torch.where(failed, self._failed, torch.where(stopped, self._stop, finish))
        kept = num.masked_fill(failed, 1).to(torch.int32)
        num_emitted = num.masked_fill(failed, 0)
        if table.num is not None:
            silent = table.num == 0
            finish, num_emitted = finish.masked_fill(silent, 0), num_emitted.masked_fill(silent, 0)
        emitted = table.targets.masked_fill(self._depths[:n] >= num_emitted.unsqueeze(1), 0)
        return Verdict(
            kept=self._keep_prefill(fb, kept),
            path=self._chains[:num_rows],
            emitted=self._widen(emitted),
            num_emitted=num_emitted.to(torch.int32),
            finish=finish,
        )

    def _widen(self, table: torch.Tensor) -> torch.Tensor:
        """A table [R, n, ...] as [R, 1 + k_max, ...], with zeros behind."""
        missing = self._width - table.shape[1]
        return pad(table, (0, 0) * (table.ndim - 2) + (0, missing)) if missing else table

    def _keep_prefill(self, fb: ForwardBatch, kept: torch.Tensor) -> torch.Tensor:
        """Kept [R] int32, with prefill rows keeping all they fed."""
        prefill = [row.kind is RowKind.PREFILL for row in fb.batch.rows]
        if not any(prefill):
            return kept
        return torch.where(upload(prefill, kept.device) > 0, fb.fed.to(torch.int32), kept)

    def _keep_chunks(self, fb: ForwardBatch) -> Verdict:
        """The verdict on a step that samples nowhere: prefill chunks, which keep what they fed."""
        num_rows = len(fb.batch.rows)
        return Verdict(
            kept=fb.fed.to(torch.int32),
            path=self._chains[:num_rows],
            emitted=fb.tokens.new_zeros((num_rows, self._width)),
            num_emitted=torch.zeros_like(fb.fed, dtype=torch.int32),
            finish=torch.zeros_like(fb.fed, dtype=torch.int8),
        )

    def _logprobs(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        blocks: Blocks,
        slots: list[int],
        padded: torch.Tensor | None,
    ) -> SampledLogprobs:
        """Of the rows that asked; zeros for the others, and behind a row's own positions something unspecified."""
        asked = [m for m, row in enumerate(blocks.rows()) if self._store.wants(slots[row], Feature.LOGPROBS)]
        num_top = max(self._store.max_logprobs(slots), 1)
        index = upload(asked, logits.device)
        tables = []
        for found in logprobs_of(logits[index], targets[index], num_top=num_top):
            flat = torch.zeros((blocks.total, *found.shape[1:]), dtype=found.dtype, device=found.device)
            flat = flat.index_copy(0, index, found)
            table = flat.view(len(slots), -1, *found.shape[1:]) if padded is None else flat[padded]
            tables.append(self._widen(table))
        return SampledLogprobs(chosen=tables[0], top_tokens=tables[1], top_values=tables[2])


def _fed(fb: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens fed at the judged positions [M], and where they stand [M]."""
    if fb.sample_starts[-1] == fb.tokens.shape[0]:
        return fb.tokens, fb.positions
    return fb.tokens[fb.sample_at], fb.positions[fb.sample_at]
