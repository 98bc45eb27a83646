"""What bounds the scheduler, who waits in which order, and which requests are refused before they queue."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from runtime.api import MAX_DRAFTS, MAX_LOGPROBS, MAX_PRIORITY, ConfigError, Rejected, RejectReason, Request, StateError
from runtime.plan import Sequence

LARGEST = 2**62  # of any integer that goes to the device
FURTHEST = 1e30  # of any number that does, either way (float32 ends at 3e38); its inverse is the smallest factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a step and the queue. `k_max`: most drafts of any request. `settle_lag`: 0 or 1 steps.

    `max_prefill_tokens`: known tokens in a step in which others decode, 0 for what the budget leaves.
    `max_queued_tokens`: tokens of all waiting requests, 0 for no limit; one alone may be longer. `aging_tokens`: a
    request waits at most as if it had come that many computed tokens later per unit of `Request.priority`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int
    k_max: int
    settle_lag: int
    max_prefill_tokens: int = 0
    max_queued_tokens: int = 0
    aging_tokens: int = 4096

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_queued_requests) < 1:
            raise ConfigError("max_num_seqs, max_num_batched_tokens and max_queued_requests must be at least 1")
        if min(self.max_prefill_tokens, self.max_queued_tokens) < 0 or self.aging_tokens < 1:
            raise ConfigError("max_prefill_tokens, max_queued_tokens or priority_aging_tokens is too small")
        if not 0 <= self.k_max <= MAX_DRAFTS:
            raise ConfigError(f"the number of drafts is {self.k_max}, but must be between 0 and {MAX_DRAFTS}")
        if self.settle_lag not in (0, 1):
            raise ConfigError(f"settle_lag is {self.settle_lag}, but must be 0 or 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """`k`: drafts per verification of a request that does not say. `host`: the proposer needs tokens on the host."""

    k: int
    host: bool


class WaitingQueue:
    """Sequences without a lease, in order of rank. `num_tokens`: known tokens they have to compute, all together."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    @property
    def head(self) -> Sequence:
        """Who is next."""
        return self._seqs[0]

    def refuse(self, request: Request, limits: Limits, free_seats: int) -> Rejected | None:
        """The answer when too many wait. A seat that is free, and not for lack of room, counts as a place more."""
        waiting = len(self._seqs)
        if waiting >= limits.max_queued_requests + free_seats:
            return refusal(request, RejectReason.QUEUE_FULL, f"{waiting} requests are waiting already.")
        if waiting and 0 < limits.max_queued_tokens < self.num_tokens + len(request.prompt):
            message = f"{self.num_tokens} tokens are waiting already, and at most {limits.max_queued_tokens} may."
            return refusal(request, RejectReason.QUEUE_TOKENS, message)
        return None

    def add(self, seq: Sequence) -> None:
        """Puts a sequence where its rank belongs."""
        insort(self._seqs, seq, key=rank_of)
        self.num_tokens += len(seq.tokens)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out."""
        at = bisect_left(self._seqs, seq.rank, key=rank_of)
        if at == len(self._seqs) or self._seqs[at] is not seq:
            raise StateError(f"{seq.request.id} does not wait")
        del self._seqs[at]
        self.num_tokens -= len(seq.tokens)


def cut_to_fit(request: Request, max_len: int) -> Request:
    """The request with an answer that the context has room for."""
    room = max_len - len(request.prompt)
    if request.sampling.max_tokens <= room:
        return request
    sampling = msgspec.structs.replace(request.sampling, max_tokens=room)
    return msgspec.structs.replace(request, sampling=sampling)


def rank_of(seq: Sequence) -> tuple[int, int]:
    """The key of every order among requests."""
    return seq.rank


def refusal(
    request: Request, reason: RejectReason, message: str, *, param: str | None = None, code: str | None = None
) -> Rejected:
    """The answer to a request that will not run."""
    return Rejected(id=request.id, reason=reason, message=message, param=param, code=code)


def refuse_unfit(request: Request, max_len: int) -> Rejected | None:
    """The answer to a request that could not run even alone; None when it could."""
    num_prompt = len(request.prompt)
    if not num_prompt:
        return refusal(request, RejectReason.INVALID, "The prompt must hold at least one token.", param="prompt")
    if request.sampling.max_tokens < 1:
        return refusal(request, RejectReason.INVALID, "max_tokens must be at least 1.", param="max_tokens")
    if request.num_drafts is not None and request.num_drafts < 0:
        return refusal(request, RejectReason.INVALID, "num_drafts must not be negative.", param="num_drafts")
    if num_prompt + 1 > max_len:
        message = f"This model's maximum context length is {max_len} tokens, but the prompt holds {num_prompt} tokens."
        return refusal(request, RejectReason.TOO_LONG, message, param="prompt", code="context_length_exceeded")
    return None


def refuse_malformed(request: Request, vocab_size: int) -> Rejected | None:
    """The answer to a request whose own numbers would break a step, and so its batch mates; None when they cannot."""
    for param, message in _faults(request, vocab_size):
        return refusal(request, RejectReason.INVALID, message, param=param)
    return None


def _faults(request: Request, vocab_size: int) -> Iterator[tuple[str, str]]:
    sampling, ids = request.sampling, range(vocab_size)
    if request.prompt and not (min(request.prompt) in ids and max(request.prompt) in ids):
        yield "prompt", f"The prompt holds a token id outside this model's vocabulary of {vocab_size}."
    if abs(request.priority) > MAX_PRIORITY:
        yield "priority", f"priority must be within {MAX_PRIORITY} of 0 either way, not {request.priority}."
    for name, number in (("min_tokens", sampling.min_tokens), ("top_k", sampling.top_k)):
        if not 0 <= number <= LARGEST:
            yield name, f"{name} must be between 0 and {LARGEST}, not {number}."
    if not 0.0 <= sampling.temperature <= FURTHEST:
        yield "temperature", f"temperature must be between 0 and {FURTHEST:g}, not {sampling.temperature}."
    if not 0.0 < sampling.top_p <= 1.0:
        yield "top_p", f"top_p must be above 0 and at most 1, not {sampling.top_p}."
    if not 0.0 <= sampling.min_p <= 1.0:
        yield "min_p", f"min_p must be between 0 and 1, not {sampling.min_p}."
    if not 1 / FURTHEST <= sampling.repetition_penalty <= FURTHEST:
        message = f"must be between {1 / FURTHEST:g} and {FURTHEST:g}, not {sampling.repetition_penalty}."
        yield "repetition_penalty", f"repetition_penalty {message}"
    for name, penalty in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ):
        if not abs(penalty) <= FURTHEST:
            yield name, f"{name} must be at most {FURTHEST:g} either way, not {penalty}."
    for token, bias in sampling.logit_bias.items():
        if token not in ids or not abs(bias) <= FURTHEST:
            message = f"ids below {vocab_size} to at most {FURTHEST:g} either way, not {token} to {bias}."
            yield "logit_bias", f"logit_bias must map {message}"
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        yield "logprobs", f"logprobs must be between 0 and {MAX_LOGPROBS}, not {sampling.logprobs}."
