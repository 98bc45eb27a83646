"""Messages to token ids: the model's chat template in a sandbox, and content that cannot forge control tokens.

A marker such as `<|im_end|>` inside content is replaced by a placeholder nobody can guess before the template runs, and
is encoded as ordinary text afterwards. Content without markers is encoded exactly as the tokenizer encodes the whole.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.api import ConfigError, RequestError
from server.tokenizer import TextTokenizer

MAX_RENDERED_CHARS = 32 * 1024 * 1024
SERVER_KEYS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"})
NEUTRAL_KEYS = frozenset({"enable_thinking"})


def raise_exception(message: str) -> Never:
    """What a template calls to refuse a conversation."""
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    """The current date, for templates that print it."""
    return datetime.datetime.now(tz=datetime.UTC).astimezone().strftime(pattern)


def tojson(value: Any, indent: int | None = None) -> str:
    """JSON as models saw it in training: not escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def read_template(model_dir: Path) -> str | None:
    """The template of a model directory: its own file, or the entry in tokenizer_config.json."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    config = model_dir / "tokenizer_config.json"
    if config.is_file():
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, list):
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        return template if isinstance(template, str) else None
    return None


class ChatTemplate:
    """Owns the compiled template. Only names the template really reads can be set by a request."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = tojson
        environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, **special_tokens)
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ConfigError(f"The chat template is not valid: {error.message}.") from error
        self.settable = (frozenset(names) | NEUTRAL_KEYS) - SERVER_KEYS - frozenset(environment.globals)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, generate: bool) -> str:
        """The conversation as one text, at most `MAX_RENDERED_CHARS` long."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                **variables, messages=messages, tools=None, documents=None, add_generation_prompt=generate
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise RequestError("The rendered conversation is too long.", param="messages")
        except RequestError:
            raise
        except Exception as error:  # a template may fail in any way; what it says stays inside
            raise RequestError("The chat template does not accept this conversation.", param="messages") from error
        return "".join(pieces)


def neutralise(value: Any, pattern: re.Pattern[str], nonce: str, found: list[str]) -> Any:
    """`value` with every marker in every string replaced by a placeholder; `found` collects the originals."""

    def placeholder(match: re.Match[str]) -> str:
        found.append(match.group())
        return f"{nonce}{len(found) - 1}z"

    if isinstance(value, str):
        return pattern.sub(placeholder, value)
    if isinstance(value, Mapping):
        return {key: neutralise(item, pattern, nonce, found) for key, item in value.items()}
    if isinstance(value, list):
        return [neutralise(item, pattern, nonce, found) for item in value]
    return value


class PromptEncoder:
    """Messages or text to ids, for one model."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template

    @classmethod
    def load(cls, tokenizer: TextTokenizer, model_dir: Path) -> PromptEncoder:
        """With the template of a model directory, if it has one."""
        source = read_template(model_dir)
        if source is None:
            return cls(tokenizer, None)
        config = model_dir / "tokenizer_config.json"
        names = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        special: dict[str, str] = {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = names.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special[key] = text
        return cls(tokenizer, ChatTemplate(source, special))

    def encode_text(self, text: str, max_len: int) -> list[int]:
        """A plain prompt. Its author writes control tokens on purpose."""
        self._refuse_hopeless(text, max_len, "prompt")
        return self.tokenizer.encode(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_len: int,
        *,
        variables: Mapping[str, Any],
        generate: bool = True,
    ) -> list[int]:
        """A conversation. Whatever content says, only the template writes control tokens."""
        if self.template is None:
            raise RequestError("This model has no chat template; use /v1/completions.", param="messages")
        for name in variables:
            if name not in self.template.settable:
                raise RequestError(f"The chat template has no setting '{name[:64]}'.", param="chat_template_kwargs")
        pattern = self.tokenizer.marker_pattern
        found: list[str] = []
        nonce = f"z{secrets.token_hex(12)}z"
        if pattern is not None:
            messages = neutralise(list(messages), pattern, nonce, found)
            variables = neutralise(variables, pattern, nonce, found)
        text = self.template.render(messages, variables, generate=generate)
        self._refuse_hopeless(text, max_len, "messages")
        if not found or pattern is None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self._encode_parts(text, pattern, re.compile(f"{nonce}([0-9]+)z"), found)

    def _encode_parts(
        self, text: str, pattern: re.Pattern[str], placeholder: re.Pattern[str], found: list[str]
    ) -> list[int]:
        """Cuts at the template's own markers; what lies between is text, with the users' markers put back as text."""
        ids: list[int] = []
        start = 0
        for match in [*pattern.finditer(text), None]:
            part = text[start : match.start() if match else len(text)]
            restored, count = placeholder.subn(lambda hit: found[int(hit.group(1))], part)
            if count:
                ids += self.tokenizer.encode_as_text(restored)
            elif part:
                ids += self.tokenizer.encode(part, add_special_tokens=False)
            if match:
                ids.append(self.tokenizer.markers[match.group()])
                start = match.end()
        return ids

    def _refuse_hopeless(self, text: str, max_len: int, param: str) -> None:
        """A text that cannot fit, however well it compresses, is not worth tokenizing."""
        least = len(text) // (4 * self.tokenizer.max_token_chars)
        if least >= max_len:
            raise too_long(max_len, least, param, at_least=True)


def too_long(max_len: int, length: int, param: str, *, at_least: bool = False) -> RequestError:
    """The error of a prompt that does not fit, with both numbers."""
    amount = f"at least {length}" if at_least else str(length)
    return RequestError(
        f"This model's maximum context length is {max_len} tokens. However, your {param} resulted in {amount} tokens. "
        f"Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )
