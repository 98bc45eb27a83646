"""What changes a row of logits before a token is drawn: one class each, all applied at every verified position.

It leaves rows that did not ask for it as they are (same bits in, same bits out), and never empties a row.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Protocol

import torch

from runtime.sampling.positions import Positions
from runtime.sampling.ranking import ascending, logit_of, rank_keys, token_of
from runtime.sampling.store import NO_STOP, Feature, SamplingStore

# Probabilities as integers of this many per unit: their sums are exact, so no order of summation can move a cut.
_UNIT = float(2**40)


class Processor(Protocol):
    """Maps logits to logits, using a request's parameters and its place in its own sequence only."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, at: Positions, *, store: SamplingStore) -> torch.Tensor:
        """The new logits [M, vocab] float32; `logits` is left as it is."""


class LogitBias(Processor):
    """Adds the request's own constant to some logits."""

    def apply(self, logits: torch.Tensor, at: Positions, *, store: SamplingStore) -> torch.Tensor:
        """Logits [M, vocab] -> [M, vocab]."""
        assert store.bias is not None
        return logits + store.bias[at.slots]


class Penalties(Processor):
    """Repetition (prompt and output), then frequency and presence (output only), as of this position of the block."""

    def apply(self, logits: torch.Tensor, at: Positions, *, store: SamplingStore) -> torch.Tensor:
        """Logits [M, vocab] -> [M, vocab]."""
        assert store.in_prompt is not None and store.output_counts is not None
        counts = store.output_counts[at.slots]
        if at.drafts.shape[1] > 0:
            counts.scatter_add_(1, at.drafts.clamp(0, store.vocab_size - 1), (at.drafts >= 0).to(torch.int32))
        repetition = store.repetition[at.slots].unsqueeze(1)
        seen = store.in_prompt[at.slots] | (counts > 0)
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - store.frequency[at.slots].unsqueeze(1) * counts
        return logits - store.presence[at.slots].unsqueeze(1) * (counts > 0)


class MinTokens(Processor):
    """Bars EOS and stop ids while fewer than `min_tokens` tokens are generated, unless nothing else could be drawn."""

    def apply(self, logits: torch.Tensor, at: Positions, *, store: SamplingStore) -> torch.Tensor:
        """Logits [M, vocab] -> [M, vocab]."""
        early = at.positions < store.min_total[at.slots]
        stops = store.ends[at.slots, 1:]
        stops = torch.where((stops == NO_STOP) | ~early.unsqueeze(1), store.vocab_size, stops)
        barred = torch.zeros((logits.shape[0], store.vocab_size + 1), dtype=torch.bool, device=logits.device)
        barred = barred.scatter_(1, stops, value=True)[:, :-1]
        left = logits.masked_fill(barred, -math.inf)
        return torch.where((left.amax(1) == -math.inf).unsqueeze(1), logits, left)


class Temperature(Processor):
    """Divides by the temperature."""

    def apply(self, logits: torch.Tensor, at: Positions, *, store: SamplingStore) -> torch.Tensor:
        """Logits [M, vocab] -> [M, vocab]; rows with temperature 0 must not come here."""
        return logits / store.temperature[at.slots].unsqueeze(1)


class TopK(Processor):
    """Keeps exactly the k best tokens; of equal ones the lower ids."""

    def apply(self, logits: torch.Tensor, at: Positions, *, store: SamplingStore) -> torch.Tensor:
        """Logits [M, vocab] -> [M, vocab]."""
        keys = rank_keys(logits)
        best = keys.topk(at.max_top_k, dim=1).values
        k = store.top_k[at.slots].unsqueeze(1)
        worst_kept = best.gather(1, (k - 1).clamp(max=at.max_top_k - 1))
        return torch.where((keys >= worst_kept) | (k >= store.vocab_size), logits, -math.inf)

    def narrow(self, logits: torch.Tensor, at: Positions, *, store: SamplingStore) -> tuple[torch.Tensor, torch.Tensor]:
        """The same where every row filters: logits and token ids [M, max_top_k] of the best, best first."""
        best = rank_keys(logits).topk(at.max_top_k, dim=1).values
        ranks = torch.arange(at.max_top_k, device=logits.device)
        kept = ranks < store.top_k[at.slots].unsqueeze(1)
        return torch.where(kept, logit_of(best), -math.inf), token_of(best, logits.shape[1])


class TopP(Processor):
    """Keeps the smallest set of best tokens that holds at least top_p of the probability; of equal ones lower ids."""

    def apply(self, logits: torch.Tensor, at: Positions, *, store: SamplingStore) -> torch.Tensor:
        """Logits [M, vocab] -> [M, vocab]."""
        top_p = store.top_p[at.slots].unsqueeze(1)
        keys = rank_keys(logits)
        ranked = ascending(keys)
        ordered = logit_of(ranked)
        upto = ((ordered - ordered[:, -1:]).exp() * _UNIT).to(torch.int64).cumsum(1)
        total = upto[:, -1:]
        better = total - upto  # what the tokens before this one hold together, seen from the best
        dropped = (better >= top_p * total) & (top_p < 1.0)
        num_dropped = dropped.sum(1, keepdim=True).clamp(max=logits.shape[1] - 1)
        return torch.where(keys >= ranked.gather(1, num_dropped), logits, -math.inf)


class MinP(Processor):
    """Keeps tokens at least min_p times as likely as the best one."""

    def apply(self, logits: torch.Tensor, at: Positions, *, store: SamplingStore) -> torch.Tensor:
        """Logits [M, vocab] -> [M, vocab]."""
        floor = logits.amax(1, keepdim=True) + store.log_min_p[at.slots].unsqueeze(1)
        return torch.where(logits >= floor, logits, -math.inf)


_TOP_K = TopK()

# In this order. Those from the temperature on leave the argmax where it is, so greedy rows skip them.
PROCESSORS: dict[Feature, Processor] = {
    Feature.LOGIT_BIAS: LogitBias(),
    Feature.PENALTIES: Penalties(),
    Feature.MIN_TOKENS: MinTokens(),
    Feature.TEMPERATURE: Temperature(),
    Feature.TOP_K: _TOP_K,
    Feature.TOP_P: TopP(),
    Feature.MIN_P: MinP(),
}

_SHAPING = (Feature.LOGIT_BIAS, Feature.PENALTIES, Feature.MIN_TOKENS)
_FILTERS = (Feature.TEMPERATURE, Feature.TOP_K, Feature.TOP_P, Feature.MIN_P)


def shape(logits: torch.Tensor, at: Positions, *, store: SamplingStore, features: Feature) -> torch.Tensor:
    """Logits [M, vocab] after what moves the argmax too, as far as `features` ask for it."""
    for feature in _SHAPING:
        if feature in features:
            logits = PROCESSORS[feature].apply(logits, at, store=store)
    return logits


def filtered(
    logits: torch.Tensor, at: Positions, *, store: SamplingStore, features: Feature
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits of rows that draw, after temperature and filters; and their token ids, or None for the whole vocabulary.

    When every row filters by top_k only its candidates go on, [M, max_top_k]. They have the same values either way.
    """
    tokens = None
    for feature in _FILTERS:
        if feature is Feature.TOP_K and at.all_top_k:
            logits, tokens = _TOP_K.narrow(logits, at, store=store)
        elif feature in features:
            logits = PROCESSORS[feature].apply(logits, at, store=store)
    return logits, tokens
