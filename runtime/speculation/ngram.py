"""Prompt lookup: drafts what followed the last tokens the previous time they occurred in the same request.

The method is known as prompt lookup decoding (Saxena, 2023). Needs no model, no state and no device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

import torch

from runtime.speculation.proposer import Drafts, HiddenNeed, Placement, SpeculativeProposer
from runtime.speculation.registry import ProposerParts
from runtime.state.paged import PagedStore
from runtime.state.pool import StateTxn
from runtime.state.recurrent import SlotStore
from runtime.step import ForwardBatch, Verdict

LONGEST = 4
SHORTEST = 2


class NgramProposer(SpeculativeProposer):
    """Runs on the host, after the read-back: its rows are not planned before the previous step has settled."""

    name = "ngram"
    placement = Placement.HOST
    needs = HiddenNeed.NONE

    def num_bytes(self) -> int:
        """Nothing is stored."""
        return 0

    def paged_stores(self) -> tuple[PagedStore, ...]:
        """None."""
        return ()

    def slot_stores(self) -> tuple[SlotStore, ...]:
        """None: a sequence's tokens are always known."""
        return ()

    def extend(self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict) -> None:
        """The tokens themselves are all the state there is."""

    def propose(
        self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict, num_drafts: tuple[int, ...]
    ) -> Drafts:
        """Looks every row's ending up in its own tokens."""
        emitted, counts = verdict.emitted.tolist(), verdict.num_emitted.tolist()
        found = [
            lookup([*row.seq.tokens, *emitted[i][: counts[i]]], num_drafts[i]) if counts[i] else []
            for i, row in enumerate(txn.batch.rows)
        ]
        width = max((len(tokens) for tokens in found), default=0)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
        shape = (len(found), width)
        return Drafts(torch.tensor(padded, dtype=torch.long).reshape(shape), tuple(len(tokens) for tokens in found))


def lookup(tokens: Seq[int], count: int) -> list[int]:
    """Up to `count` tokens that followed the latest earlier occurrence of the longest possible ending of `tokens`."""
    if count <= 0:
        return []
    text = array("q", tokens)
    raw, size = text.tobytes(), text.itemsize
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        ending = raw[-length * size :]
        end = len(raw) - size  # an occurrence must leave at least one token behind it
        while (at := raw.rfind(ending, 0, end)) >= 0:
            if at % size == 0:
                start = at // size + length
                return list(text[start : start + count])
            end = at + len(ending) - 1
    return []


def build(parts: ProposerParts) -> NgramProposer:
    """Works with every model."""
    del parts
    return NgramProposer()
