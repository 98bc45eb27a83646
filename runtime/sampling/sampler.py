"""From logits to one target token per position."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kernels.gumbel import counter_gumbel, counter_gumbel_at
from runtime.sampling.positions import Positions
from runtime.sampling.processors import filtered, shape
from runtime.sampling.ranking import argmax
from runtime.sampling.store import Feature, SamplingStore
from runtime.sampling.upload import upload


def sample(
    logits: torch.Tensor, at: Positions, *, store: SamplingStore, features: Feature, drawn: Seq[int] | None
) -> torch.Tensor:
    """Targets [M] int64 for float32 logits [M, vocab].

    `features`: what any row asks for. `drawn`: the rows (of M) that sample, on the host; None for all, the others are
    greedy. Drawing is Gumbel-max: the argmax of processed logits plus noise, which is a function of the row's seed and
    position, so its token depends on nothing else in the batch.
    """
    logits = shape(logits, at, store=store, features=features)
    if drawn is None:
        return _draw(logits, at, store=store, features=features)
    if not drawn:
        return argmax(logits)
    index = upload(drawn, logits.device)
    return argmax(logits).index_copy(0, index, _draw(logits[index], at.take(index), store=store, features=features))


def _draw(logits: torch.Tensor, at: Positions, *, store: SamplingStore, features: Feature) -> torch.Tensor:
    """Gumbel-max; of equal sums the lowest token id wins, whether or not all of the vocabulary is looked at."""
    logits, tokens = filtered(logits, at, store=store, features=features)
    seeds = store.seed[at.slots]
    if tokens is None:
        return argmax(logits + counter_gumbel(seeds, at.positions, store.vocab_size, logits.device))
    noisy = logits + counter_gumbel_at(seeds, at.positions, tokens)
    best = noisy == noisy.amax(1, keepdim=True)
    return torch.where(best, tokens, store.vocab_size - 1).amin(1)
