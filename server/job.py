"""One validated HTTP request as work: prompts as ids, sampling resolved, and how the answer is to look."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.api import ModelInfo, Request, RequestError, SamplingParams
from server.prompt import too_long
from server.schema.common import SamplingFields

SEED_MASK = 2**63 - 1
SMALLEST_TOP_P = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that does not say gets."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_model(cls, model_dir: Path) -> SamplingDefaults:
        """From generation_config.json, as far as it makes sense; `do_sample: false` means greedy."""
        path = model_dir / "generation_config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()

        def number(name: str, low: float, high: float, default: float) -> float:
            value = config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
                return float(value)
            return default

        greedy = config.get("do_sample") is False
        return cls(
            temperature=number("temperature", 0.0, 2.0, 1.0) if not greedy else 0.0,
            top_p=number("top_p", 0.0, 1.0, 1.0),
            top_k=int(number("top_k", 0, 2**31 - 1, 0)),
            min_p=number("min_p", 0.0, 1.0, 0.0),
            repetition_penalty=number("repetition_penalty", 1e-3, 100.0, 1.0),
        )


def sub_seed(seed: int, choice: int) -> int:
    """The seed of one of n choices; the first has the request's own."""
    if choice == 0:
        return seed & SEED_MASK
    data = seed.to_bytes(8, "big", signed=True) + choice.to_bytes(4, "big")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") & SEED_MASK


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything the answer depends on."""

    id: str
    model: str
    created: int
    fields: SamplingFields
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...]  # choice `p * n + j` is choice j of prompt p

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.fields.n

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with usage."""
        options = self.fields.stream_options
        return options is not None and options.include_usage


def check_prompt(prompt: tuple[int, ...], info: ModelInfo, param: str) -> None:
    """A prompt the engine can take: not empty, known ids, room for one token."""
    if not prompt:
        raise RequestError(f"'{param}' is empty.", param=param)
    if max(prompt) >= info.vocab_size:
        raise RequestError(f"Token ids in '{param}' must be below {info.vocab_size}.", param=param)
    if len(prompt) >= info.max_model_len:
        raise too_long(info.max_model_len, len(prompt), param)


def sampling_params(
    fields: SamplingFields, defaults: SamplingDefaults, info: ModelInfo, *, prompt_len: int, seed: int
) -> SamplingParams:
    """The request's own values over the defaults. The limit is clamped to the room the context leaves."""
    room = info.max_model_len - prompt_len
    max_tokens = min(fields.max_new_tokens or room, room)
    if fields.max_new_tokens is not None and fields.min_tokens > fields.max_new_tokens:
        raise RequestError("'min_tokens' must not be greater than the token limit.", param="min_tokens")
    top_k = defaults.top_k if fields.top_k is None else max(fields.top_k, 0)
    top_p = defaults.top_p if fields.top_p is None else fields.top_p
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(fields.min_tokens, max_tokens),
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        top_k=min(top_k, info.vocab_size) if top_k else 0,
        top_p=max(top_p, SMALLEST_TOP_P),
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        seed=seed,
        repetition_penalty=(
            defaults.repetition_penalty if fields.repetition_penalty is None else fields.repetition_penalty
        ),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=fields.logit_bias,
        stop_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        logprobs=fields.top_logprobs_wanted,
    )


def make_job(
    prefix: str,
    fields: SamplingFields,
    prompts: tuple[tuple[int, ...], ...],
    *,
    model: str,
    info: ModelInfo,
    defaults: SamplingDefaults,
    max_choices: int,
    prompt_param: str,
) -> Job:
    """Checks what needs the model and spreads prompts x n over engine requests; raises RequestError."""
    if len(prompts) * fields.n > max_choices:
        raise RequestError(f"At most {max_choices} choices are allowed in one request.", param="n")
    for name, ids in (("logit_bias", fields.logit_bias), ("stop_token_ids", fields.stop_token_ids)):
        if ids and max(ids) >= info.vocab_size:
            raise RequestError(f"Token ids in '{name}' must be below {info.vocab_size}.", param=name)
    job_id = f"{prefix}-{secrets.token_hex(12)}"
    seed = secrets.randbits(63) if fields.seed is None else fields.seed
    num_drafts = fields.speculation.num_drafts if fields.speculation is not None else None
    requests: list[Request] = []
    for prompt in prompts:
        check_prompt(prompt, info, prompt_param)
        for choice in range(fields.n):
            requests.append(
                Request(
                    id=f"{job_id}-{len(requests)}",
                    prompt=prompt,
                    sampling=sampling_params(
                        fields, defaults, info, prompt_len=len(prompt), seed=sub_seed(seed, choice)
                    ),
                    num_drafts=num_drafts,
                    priority=fields.priority,
                    cache_salt=fields.cache_salt or "",
                )
            )
    return Job(
        id=job_id, model=model, created=int(time.time()), fields=fields, prompts=prompts, requests=tuple(requests)
    )
