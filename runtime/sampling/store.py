"""What the device must know of each request's sampling, by state slot. Written at admission; knows no batch."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from runtime.api import SamplingParams, StateError
from runtime.sampling.upload import upload

# Below this temperature the law is a point mass in float32, and dividing by it could overflow: it means greedy.
MIN_TEMPERATURE = 1e-5
NO_STOP = -1
_UNBOUND = 1 << 30


class Feature(enum.IntFlag):
    """What a request asks for beyond the argmax of the model's logits."""

    NONE = 0
    LOGIT_BIAS = enum.auto()
    PENALTIES = enum.auto()
    MIN_TOKENS = enum.auto()
    TEMPERATURE = enum.auto()
    TOP_K = enum.auto()
    TOP_P = enum.auto()
    MIN_P = enum.auto()
    LOGPROBS = enum.auto()


class SamplingStore:
    """Sampling data of every state slot, on the device and (what the host branches on) on the host.

    Per slot [num_slots]: temperature, log_min_p, repetition, presence, frequency float32; top_p float64; top_k, seed,
    min_total int64. `ends` [num_slots, 1 + n] int64: the last position a token may take, then the stop ids, padded with
    -1. `bias` float32, `in_prompt` bool and `output_counts` int32, all [num_slots, vocab], exist from the first request
    on that needs them; `output_counts` includes tokens emitted by steps the host has not seen yet.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.device = device
        self.temperature = self._column(0.0)
        self.top_p = self._column(1.0).to(torch.float64)
        self.log_min_p = self._column(-math.inf)
        self.repetition = self._column(1.0)
        self.presence = self._column(0.0)
        self.frequency = self._column(0.0)
        self.top_k = self._integers(vocab_size)
        self.seed = self._integers(0)
        self.min_total = self._integers(0)
        self.ends = torch.full((num_slots, 1 + 2), NO_STOP, dtype=torch.int64, device=device)
        self.bias: torch.Tensor | None = None
        self.in_prompt: torch.Tensor | None = None
        self.output_counts: torch.Tensor | None = None
        self._features = [_UNBOUND] * num_slots
        self._top_k = [0] * num_slots
        self._num_logprobs = [0] * num_slots

    def bind(
        self,
        slot: int,
        params: SamplingParams,
        *,
        prompt: Seq[int],
        output_tokens: Seq[int],
        prompt_len: int,
        max_total: int,
        eos_ids: Seq[int],
    ) -> None:
        """Writes a request into `slot`. `output_tokens` (settled output, on resume) are counted as if just emitted."""
        if self._features[slot] != _UNBOUND:
            raise StateError(f"sampling slot {slot} is still bound")
        features = _features(params)
        self._features[slot] = int(features)
        self._top_k[slot] = params.top_k if features & Feature.TOP_K else 0
        self._num_logprobs[slot] = params.logprobs or 0
        self.temperature[slot] = params.temperature if features & Feature.TEMPERATURE else 0.0
        self.top_p[slot] = params.top_p
        self.log_min_p[slot] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.top_k[slot] = params.top_k if features & Feature.TOP_K else self.vocab_size
        self.seed[slot] = (params.seed + 2**63) % 2**64 - 2**63
        self.min_total[slot] = prompt_len + params.min_tokens
        self._write_ends(slot, max_total, dict.fromkeys((*(() if params.ignore_eos else eos_ids), *params.stop_ids)))
        if features & Feature.LOGIT_BIAS:
            self._write_bias(slot, params.logit_bias)
        if features & Feature.PENALTIES:
            self._write_counts(slot, prompt, output_tokens)

    def release(self, slot: int) -> None:
        """Forgets the request in `slot`."""
        if self._features[slot] == _UNBOUND:
            raise StateError(f"sampling slot {slot} is not bound")
        if self.bias is not None and self._features[slot] & Feature.LOGIT_BIAS:
            self.bias[slot] = 0.0
        self._features[slot] = _UNBOUND

    def features(self, slots: Iterable[int]) -> Feature:
        """What the requests in `slots` ask for, taken together."""
        union = 0
        for slot in slots:
            union |= self._features[slot]
        if union & _UNBOUND:
            raise StateError("a row was judged whose slot has no sampling parameters")
        return Feature(union)

    def wants(self, slot: int, feature: Feature) -> bool:
        """Whether the request in `slot` asks for `feature`."""
        return bool(self._features[slot] & feature)

    def max_top_k(self, slots: Iterable[int]) -> int:
        """The largest top_k among `slots`; 0 when none filters."""
        return min(max((self._top_k[slot] for slot in slots), default=0), self.vocab_size)

    def max_logprobs(self, slots: Iterable[int]) -> int:
        """The largest number of alternatives wanted among `slots`."""
        return max((self._num_logprobs[slot] for slot in slots), default=0)

    def count(self, slots: torch.Tensor, emitted: torch.Tensor, *, valid: torch.Tensor) -> None:
        """Adds emitted tokens [R, n], where valid [R, n], to the output counts of slots [R]."""
        if self.output_counts is not None:
            rows = slots.unsqueeze(1).expand_as(emitted)
            self.output_counts.index_put_((rows, emitted), valid.to(torch.int32), accumulate=True)

    def _column(self, neutral: float) -> torch.Tensor:
        return torch.full((self.num_slots,), neutral, dtype=torch.float32, device=self.device)

    def _integers(self, neutral: int) -> torch.Tensor:
        return torch.full((self.num_slots,), neutral, dtype=torch.int64, device=self.device)

    def _write_ends(self, slot: int, max_total: int, stops: Iterable[int]) -> None:
        row = [max_total - 1, *(token for token in stops if 0 <= token < self.vocab_size)]
        missing = len(row) - self.ends.shape[1]
        if missing > 0:
            self.ends = torch.nn.functional.pad(self.ends, (0, missing), value=NO_STOP)
        self.ends[slot] = upload(row + [NO_STOP] * -min(missing, 0), self.device)

    def _write_bias(self, slot: int, logit_bias: dict[int, float]) -> None:
        if self.bias is None:
            self.bias = torch.zeros((self.num_slots, self.vocab_size), dtype=torch.float32, device=self.device)
        row = torch.zeros(self.vocab_size, dtype=torch.float32)
        row[torch.tensor(list(logit_bias), dtype=torch.int64)] = torch.tensor(list(logit_bias.values()))
        self.bias[slot] = row.to(self.device)

    def _write_counts(self, slot: int, prompt: Seq[int], output_tokens: Seq[int]) -> None:
        if self.in_prompt is None or self.output_counts is None:
            shape = (self.num_slots, self.vocab_size)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        counts = torch.bincount(torch.tensor(output_tokens, dtype=torch.int64), minlength=self.vocab_size)
        present = torch.zeros(self.vocab_size, dtype=torch.bool)
        present[torch.tensor(prompt, dtype=torch.int64)] = True
        self.output_counts[slot] = counts.to(device=self.device, dtype=torch.int32)
        self.in_prompt[slot] = present.to(self.device)


def _features(params: SamplingParams) -> Feature:
    """What `params` asks for. Filters are no features of a greedy request: they never move its argmax."""
    features = Feature.NONE
    if params.logit_bias:
        features |= Feature.LOGIT_BIAS
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0):
        features |= Feature.PENALTIES
    if params.min_tokens > 0:
        features |= Feature.MIN_TOKENS
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
    if params.temperature < MIN_TEMPERATURE:
        return features
    features |= Feature.TEMPERATURE
    if params.top_k > 0:
        features |= Feature.TOP_K
    if params.top_p < 1.0:
        features |= Feature.TOP_P
    if params.min_p > 0.0:
        features |= Feature.MIN_P
    return features
