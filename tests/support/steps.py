"""Steps by hand: leases, rows and verdicts of one's own choosing, through the pool's own begin, commit and settle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from runtime.engine import Engine
from runtime.plan import Batch, Outcome, Row, RowKind, StateLease
from runtime.plan import Sequence as Running
from runtime.state.ledger import Shortage
from runtime.state.pool import StateTxn
from runtime.step import StepPart, Verdict
from tests.support.engines import greedy
from tests.support.oracle import Look, look_at

PREFILL, DECODE, VERIFY = RowKind.PREFILL, RowKind.DECODE, RowKind.VERIFY


@dataclass(eq=False)
class Held:
    """A lease and the tokens whose state it holds once everything has settled."""

    seq: Running
    lease: StateLease
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Feed:
    """One row: what is fed, and the parents of the fed nodes when they are a tree."""

    held: Held
    kind: RowKind
    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None

    @property
    def row(self) -> Row:
        lease, tokens = self.held.lease, self.tokens
        if self.kind is PREFILL:
            return Row(self.held.seq, lease, PREFILL, len(tokens), emits=False, tokens=tokens, start=lease.bound)
        drafts = tokens[1:]
        return Row(self.held.seq, lease, self.kind, len(tokens), True, num_drafts=len(drafts), drafts=drafts)


class Hand:
    """Works on the pool and the runner of an engine that serves no request meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.pool = engine.states
        self.runner = engine.runner
        self._held: list[Held] = []

    def admit(self, name: str = "hand", num_tokens: int = 64) -> Held:
        request = greedy(name, (0,), 1)
        lease = self.pool.ledger.admit(name, num_tokens)
        assert not isinstance(lease, Shortage), lease
        held = Held(Running(request, [0], 0, 0.0), lease)
        self._held.append(held)
        return held

    def begin(self, *feeds: Feed) -> StateTxn:
        """Opens a step; rows of one kind must be neighbours."""
        for feed in feeds:
            if feed.kind is not PREFILL:
                self.runner.seed(feed.held.lease.slot, feed.tokens[0])
        batch = Batch(0, tuple(feed.row for feed in feeds))
        if all(feed.parents is None for feed in feeds):
            return self.pool.begin(batch)
        chains = type(self.pool)._parts
        self.pool._parts = lambda batch: tuple(_tree(part, feeds) for part in chains(self.pool, batch))
        try:
            return self.pool.begin(batch)
        finally:
            del self.pool._parts

    def forward(self, txn: StateTxn) -> torch.Tensor:
        """Logits of every position of DECODE and VERIFY rows."""
        return self.runner.forward(txn, self.runner.prepare(txn))[1]

    def commit(self, txn: StateTxn, kept: Sequence[int], paths: Sequence[Sequence[int]] | None = None) -> None:
        self.pool.commit(txn, verdict(kept, paths or [range(row.num_fed) for row in txn.batch.rows]))

    def settle(self, txn: StateTxn, kept: Sequence[int]) -> None:
        nothing = (None,) * len(kept)
        self.pool.settle(txn, Outcome(tuple(kept), ((),) * len(kept), nothing, nothing))

    def step(
        self, *feeds: Feed, kept: Sequence[int] | None = None, paths: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """One whole step; without `kept` everything fed is kept. `Held.tokens` follow. Returns the logits."""
        counts = [len(feed.tokens) for feed in feeds] if kept is None else list(kept)
        taken = paths or [range(len(feed.tokens)) for feed in feeds]
        txn = self.begin(*feeds)
        logits = self.forward(txn)
        self.commit(txn, counts, taken)
        self.settle(txn, counts)
        for feed, count, path in zip(feeds, counts, taken, strict=True):
            feed.held.tokens += [feed.tokens[node] for node in path[:count]]
        return logits

    def look(self, held: Held) -> Look:
        """What the pool holds of a lease with nothing in flight."""
        return look_at(self.pool, held.lease)

    def close(self) -> None:
        """Drops the open step and what was never settled, and gives every lease back that is still open."""
        if self.pool._open is not None:
            self.pool.abort(self.pool._open)
        for txn in list(self.pool._unsettled):
            self.settle(txn, [1] * len(txn.batch.rows))
        for held in self._held:
            if not (held.lease.closed or held.lease.closing):
                self.pool.release(held.lease)
        self.pool.sweep()


def verdict(kept: Sequence[int], paths: Sequence[Sequence[int]]) -> Verdict:
    """What a step decided, with nothing emitted."""
    width = max(len(path) for path in paths)
    table = [[*path, *[0] * (width - len(path))] for path in paths]
    zero = torch.zeros(len(kept), dtype=torch.int32)
    return Verdict(
        kept=torch.tensor(kept, dtype=torch.int32),
        path=torch.tensor(table, dtype=torch.int32),
        emitted=torch.zeros(len(kept), 1, dtype=torch.long),
        num_emitted=zero,
        finish=zero.to(torch.int8),
    )


def _tree(part: StepPart, feeds: Sequence[Feed]) -> StepPart:
    """The part with its rows' parents, and every node at the position of its depth."""
    mine = feeds[part.rows]
    width = max(part.fed)
    parents, depths = [], []
    for feed in mine:
        chosen = feed.parents if feed.parents is not None else tuple(range(-1, len(feed.tokens) - 1))
        depth: list[int] = []
        for parent in chosen:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        parents.append([*chosen, *[-1] * (width - len(chosen))])
        depths += depth
    rows = torch.repeat_interleave(torch.arange(len(mine)), torch.tensor(part.fed))
    return replace(part, parents=torch.tensor(parents), positions=part.lengths[rows] + torch.tensor(depths))
