"""What chat and legacy completions share: sampling fields, their limits, and the features that are refused."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from runtime.api import MAX_DRAFTS, MAX_LOGPROBS, MAX_PRIORITY
from server.errors import ApiError, from_validation

MAX_INT = 2**31 - 1
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_TIMEOUT = 86400.0
_log = logging.getLogger(__name__)
_seen_unknown: set[str] = set()

Model = TypeVar("Model", bound="SamplingFields")


def stop_list(value: Any) -> Any:
    """One stop string is a list of one; empty strings stop nothing."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        return [item for item in value if item != ""]
    return value


def bias_table(value: Any) -> Any:
    """`{"123": 1.5}` with decimal token ids as keys."""
    if not isinstance(value, dict):
        return value
    table: dict[int, Any] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError("keys must be decimal token ids")
        table[int(key)] = bias
    return table


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class Speculation(BaseModel):
    """Extension: how one request speculates. 0 drafts switches it off; the text is the same either way."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    num_drafts: Annotated[int, Field(ge=0, le=MAX_DRAFTS)] | None = None


Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingFields(BaseModel):
    """The fields both generation routes know. Explicit null is removed before validation and means absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    model: str | None = Field(None, max_length=512)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int = Field(1, ge=1, le=128)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(bias_table), Field(max_length=MAX_BIASES)] = {}
    stop: Annotated[
        list[Annotated[str, Field(max_length=MAX_STOP_CHARS)]], BeforeValidator(stop_list), Field(max_length=MAX_STOPS)
    ] = []
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_INT)]] = Field([], max_length=64)
    min_tokens: int = Field(0, ge=0, le=MAX_INT)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_speculation_details: bool = False
    speculation: Speculation | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    # accepted, type-checked, without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        return self

    @property
    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """Alternatives per token, 0 for the sampled token alone, None for no logprobs."""

    @property
    def num_prompts(self) -> int:
        """Prompts in one request; each is answered `n` times."""
        return 1

    @property
    @abstractmethod
    def max_new_tokens(self) -> int | None:
        """The limit the request names or its route implies; None for the rest of the context."""


TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]

# Known features that are not served: field -> values that ask for nothing. Anything else is refused, never ignored.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "beam_width": (0, 1),
    "best_of": (1,),
    "continue_final_message": (False,),
    "ebnf": (),
    "grammar": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "json_schema": (),
    "lora_path": (),
    "moderation": (),
    "prediction": (),
    "prompt_logprobs": (),
    "regex": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """400 for a known feature that is asked for and not served."""
    for name, allowed in neutral.items():
        value = body.get(name)
        if value is None or any(type(value) is type(item) and value == item for item in allowed):
            continue
        raise ApiError(400, f"'{name}' is not supported with this value by this server.", param=name)


def note_unknown(body: Mapping[str, Any], model: type[BaseModel], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Unknown fields are accepted and named once in the debug log."""
    for name in body.keys() - model.model_fields.keys() - neutral.keys():
        if len(_seen_unknown) < 256 and name not in _seen_unknown:
            _seen_unknown.add(name)
            _log.debug("unknown request field ignored: %r", name[:64])


def validate(body: Any, model: type[Model], neutral: Mapping[str, tuple[Any, ...]]) -> Model:
    """A decoded JSON body as a request; raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    body = {name: value for name, value in body.items() if value is not None}
    refuse_unsupported(body, neutral)
    note_unknown(body, model, neutral)
    try:
        return model.model_validate(body)
    except ValidationError as error:  # turned into one sentence here, where it may take its time
        raise from_validation(error) from None
