"""POST /v1/completions: the request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator

from server.schema.common import NEUTRAL, SamplingFields, TopLogprobs

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128

COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
}

Prompts = list[str] | list[list[int]]


def is_ids(value: Any) -> bool:
    """A list of integers and nothing else (true is not an integer)."""
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def prompt_list(value: Any) -> Prompts:
    """The four shapes of `prompt` as a list of texts or a list of id lists."""
    if isinstance(value, str):
        return [value]
    if is_ids(value):
        return [value]
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed in one request")
        if all(isinstance(item, str) for item in value) or all(is_ids(item) for item in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, and not empty"
    )


class CompletionRequest(SamplingFields):
    """The body of a legacy completion request."""

    prompt: Annotated[Prompts, PlainValidator(prompt_list)]
    logprobs: TopLogprobs | None = None

    @property
    def top_logprobs_wanted(self) -> int | None:
        """See `SamplingFields`."""
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        """See `SamplingFields`."""
        return len(self.prompt)

    @property
    def max_new_tokens(self) -> int | None:
        """See `SamplingFields`."""
        return self.max_tokens or DEFAULT_MAX_TOKENS
