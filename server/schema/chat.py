"""POST /v1/chat/completions: the request."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from server.errors import ApiError
from server.schema.common import MAX_INT, NEUTRAL, SamplingFields, TopLogprobs

MAX_MESSAGES = 65536
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}


def join_parts(value: Any) -> Any:
    """Content as one text: a string, or text parts put together without separators."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise ValueError(f"part {index} must be an object")
        if part.get("type") not in ("text", "refusal"):
            raise ValueError(f"part {index}: only parts of type 'text' are supported")
        text = part.get(part["type"])
        if not isinstance(text, str):
            raise ValueError(f"part {index} must have a string '{part['type']}'")
        texts.append(text)
    return "".join(texts)


class FunctionCall(BaseModel):
    """The function of a tool call in the history."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    name: str = Field(pattern=TOOL_NAME.pattern, max_length=64)
    arguments: str


class ToolCall(BaseModel):
    """A tool call in the history."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(join_parts)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a tool message needs a tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant message may have tool_calls")
        return self


class ChatRequest(SamplingFields):
    """The body of a chat completion request."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, str | int | float | bool | None] = Field({})

    # accepted, type-checked, without effect
    store: bool | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _logprobs_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        return self

    @property
    def top_logprobs_wanted(self) -> int | None:
        """See `SamplingFields`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        """See `SamplingFields`; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as templates expect them: `developer` is `system`, and all of those are one, in front."""
        system = "\n\n".join(
            message.content or "" for message in self.messages if message.role in ("system", "developer")
        )
        rest = [m for m in self.messages if m.role not in ("system", "developer")]
        messages: list[dict[str, Any]] = []
        if len(rest) < len(self.messages):
            messages.append({"role": "system", "content": system})
        for message in rest:
            entry: dict[str, Any] = {"role": message.role, "content": message.content or ""}
            if message.name is not None:
                entry["name"] = message.name
            if message.tool_call_id is not None:
                entry["tool_call_id"] = message.tool_call_id
            if message.tool_calls:
                entry["tool_calls"] = [call.model_dump() for call in message.tool_calls]
            messages.append(entry)
        return messages
