"""SCRIPT: a proposer told per request and step how many tokens to draft and how many of them are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from runtime.engine import Engine
from runtime.plan import RowKind
from runtime.scheduler import Drafting
from runtime.speculation.proposer import Drafts, HiddenNeed, Placement, SpeculativeProposer
from runtime.state.paged import PagedStore
from runtime.state.pool import StateTxn
from runtime.state.recurrent import SlotStore
from runtime.step import ForwardBatch, Verdict

Pattern = tuple[int, int]  # drafts, and how many of them are right
Plan = Callable[[str, int], Pattern]

K_MAX = 7
PATTERNS: tuple[Pattern, ...] = tuple((k, a) for k in range(K_MAX + 1) for a in range(k + 1))


class Script(SpeculativeProposer):
    """Drafts the known text's own next tokens; the one behind the right ones is wrong, those behind it right again.

    `plan(request id, step)` says the pattern. A HOST script drafts as many as the plan says; a DEVICE script as many as
    the scheduler asks for (give the request its `num_drafts`), and the plan only says how many are right. `seen` are
    the patterns verified so far; `surprises` lists verifications that did not end as scripted.
    """

    name = "script"
    needs = HiddenNeed.NONE

    def __init__(
        self, engine: Engine, texts: Mapping[str, Sequence[int]], plan: Plan, placement: Placement = Placement.HOST
    ) -> None:
        self.placement = placement
        self.seen: set[Pattern] = set()
        self.surprises: list[tuple[str, int, int, int]] = []
        self._lengths = engine.states.lengths
        self._vocab = engine.info.vocab_size
        self._texts = texts
        self._plan = plan
        self._steps: dict[str, int] = {}
        self._promised: dict[str, int] = {}

    def num_bytes(self) -> int:
        return 0

    def paged_stores(self) -> tuple[PagedStore, ...]:
        return ()

    def slot_stores(self) -> tuple[SlotStore, ...]:
        return ()

    def extend(self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict) -> None:
        for row, kept, finish in zip(txn.batch.rows, verdict.kept.tolist(), verdict.finish.tolist(), strict=True):
            if row.kind is not RowKind.VERIFY:
                continue
            self.seen.add((row.num_drafts, kept - 1))
            right = min(self._promised.get(row.seq.request.id, 0), row.num_drafts)
            if kept - 1 != right and not finish:
                self.surprises.append((row.seq.request.id, row.num_drafts, right, kept - 1))

    def propose(
        self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict, num_drafts: tuple[int, ...]
    ) -> Drafts:
        tokens = torch.zeros(len(num_drafts), max(num_drafts), dtype=torch.long)
        lengths = []
        for i, (row, wanted) in enumerate(zip(txn.batch.rows, num_drafts, strict=True)):
            count = self._draft(row.seq.request.id, row.seq.prompt_len, int(self._lengths[row.lease.slot]), wanted)
            tokens[i, : len(count)] = torch.tensor(count, dtype=torch.long)
            lengths.append(len(count))
        return Drafts(tokens, tuple(lengths))

    def _draft(self, name: str, prompt_len: int, length: int, wanted: int) -> list[int]:
        if not wanted:
            return []
        step = self._steps[name] = self._steps.get(name, -1) + 1
        count, right = self._plan(name, step)
        count = wanted if self.placement is Placement.DEVICE else min(count, wanted)
        start = length + 1 - prompt_len
        drafts = list(self._texts[name][start : start + count])
        drafts += [0] * (count - len(drafts))
        if right < count:
            drafts[right] = (drafts[right] + 1) % self._vocab
        self._promised[name] = min(right, count)
        return drafts


def attach(engine: Engine, proposer: SpeculativeProposer) -> None:
    """Replaces the proposer of an engine built with `ngram:7`."""
    engine.proposer = proposer
    engine.scheduler.drafting = Drafting(k=K_MAX, host=proposer.placement is Placement.HOST)
