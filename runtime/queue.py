"""What bounds the scheduler, and which requests it refuses before they queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.api import MAX_DRAFTS, MAX_LOGPROBS, ConfigError, Rejected, RejectReason, Request

LARGEST = 2**62  # of any integer that goes to the device
FURTHEST = 1e30  # of any number that does, either way (float32 ends at 3e38); its inverse is the smallest factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a step and the queue. `k_max`: most drafts of any request. `settle_lag`: 0 or 1 steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int
    k_max: int
    settle_lag: int

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_queued_requests) < 1:
            raise ConfigError("max_num_seqs, max_num_batched_tokens and max_queued_requests must be at least 1")
        if not 0 <= self.k_max <= MAX_DRAFTS:
            raise ConfigError(f"the number of drafts is {self.k_max}, but must be between 0 and {MAX_DRAFTS}")
        if self.settle_lag not in (0, 1):
            raise ConfigError(f"settle_lag is {self.settle_lag}, but must be 0 or 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """`k`: drafts per verification of a request that does not say. `host`: the proposer needs tokens on the host."""

    k: int
    host: bool


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
