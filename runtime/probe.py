"""Runs tokens through the model on a lease of its own, outside any request: for the self-test and for audits."""

from __future__ import annotations

import math

import torch

from runtime.api import CapacityError, Request, SamplingParams
from runtime.plan import Batch, Outcome, Row, RowKind, Sequence, StateLease
from runtime.runner import ModelRunner
from runtime.state.ledger import Shortage
from runtime.state.pool import StatePool
from runtime.step import Verdict

States = dict[int, tuple[torch.Tensor, torch.Tensor]]

SMALLEST = 1e-3  # tensors smaller than this are compared absolutely


class Probe:
    """Takes the same begin, forward, commit, settle as every step; `close` gives everything back.

    Raises CapacityError when the pool has no slot or blocks to spare.
    """

    def __init__(self, pool: StatePool, runner: ModelRunner, num_tokens: int, name: str = "probe") -> None:
        self._pool = pool
        self._runner = runner
        request = Request(id=name, prompt=(0,), sampling=SamplingParams(max_tokens=1))
        self._seq = Sequence(request, [0], 0, 0.0)
        lease = pool.ledger.admit(name, num_tokens)
        if isinstance(lease, Shortage):
            raise CapacityError(f"no {lease.currency.value} room for a probe")
        self._lease: StateLease = lease

    @property
    def lease(self) -> StateLease:
        """What it holds."""
        return self._lease

    def prefill(self, tokens: list[int], chunk: int = 256) -> None:
        """Feeds known tokens as PREFILL rows of at most `chunk` tokens."""
        for at in range(0, len(tokens), chunk):
            piece = tuple(tokens[at : at + chunk])
            start = self._lease.computed
            row = Row(self._seq, self._lease, RowKind.PREFILL, len(piece), emits=False, tokens=piece, start=start)
            self._step(row, len(piece))

    def feed(self, tokens: list[int], kept: int, kind: RowKind = RowKind.VERIFY) -> None:
        """Feeds tokens as one VERIFY (or DECODE) row, of which the first `kept` are kept."""
        self._runner.seed(self._lease.slot, tokens[0])
        drafts = tuple(tokens[1:])
        row = Row(self._seq, self._lease, kind, len(tokens), emits=True, num_drafts=len(drafts), drafts=drafts)
        self._step(row, kept)

    def states(self) -> States:
        """The committed recurrent states, copied."""
        return self._pool.peek(self._lease.slot)

    def close(self) -> None:
        """Ends the lease."""
        self._pool.release(self._lease)

    def _step(self, row: Row, kept: int) -> None:
        txn = self._pool.begin(Batch(0, (row,)))
        try:
            fb = self._runner.prepare(txn)
            self._runner.forward(txn, fb)
            device = fb.tokens.device
            counts = torch.tensor([kept], dtype=torch.int32, device=device)
            nothing = torch.zeros(1, 1, dtype=torch.long, device=device)
            zero = torch.zeros(1, dtype=torch.int32, device=device)
            path = torch.arange(row.num_fed, dtype=torch.int32, device=device)[None]
            self._pool.commit(txn, Verdict(counts, path, nothing, zero, zero.to(torch.int8)))
        except BaseException:
            self._pool.abort_if_open(txn)
            raise
        self._pool.settle(txn, Outcome((kept,), ((),), (None,), (None,)))


def largest_difference(left: States, right: States) -> float:
    """Max |a - b| / max |b| over all layers, conv windows and states; infinite when anything is not finite."""
    worst = 0.0
    for layer, tensors in left.items():
        for a, b in zip(tensors, right[layer], strict=True):
            if a.numel():
                difference = float((a - b).abs().max() / b.abs().max().clamp(min=SMALLEST))
                worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


def tolerance(dtype: torch.dtype) -> float:
    """What two ways to the same state may differ by, with weights of `dtype`: the ways differ in their rounding."""
    return 1e-4 if dtype is torch.float32 else 0.1
