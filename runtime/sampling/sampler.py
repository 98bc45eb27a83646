"""From logits to one target token per position."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kernels.gumbel import counter_gumbel
from runtime.sampling.positions import Positions
from runtime.sampling.processors import FILTERS, PROCESSORS, SHAPING
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
    for feature in SHAPING:
        if feature in features:
            logits = PROCESSORS[feature].apply(logits, at, store=store)
    if drawn is None:
        return _draw(logits, at, store=store, features=features)
    if not drawn:
        return argmax(logits)
    index = upload(drawn, logits.device)
    return argmax(logits).index_copy(0, index, _draw(logits[index], at.take(index), store=store, features=features))


def _draw(logits: torch.Tensor, at: Positions, *, store: SamplingStore, features: Feature) -> torch.Tensor:
    for feature in FILTERS:
        if feature in features:
            logits = PROCESSORS[feature].apply(logits, at, store=store)
    noise = counter_gumbel(store.seed[at.slots], at.positions, store.vocab_size, logits.device)
    return argmax(logits + noise)
