"""One streamed request to an OpenAI-compatible server, and the first words with a server before load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from server.bench.prompts import Prompt
from server.bench.sample import Emission, Sample

ROUTES = {True: "/v1/chat/completions", False: "/v1/completions"}
# What is asked for beside the generation, most first; a server that refuses is asked for the next.
EXTRAS: tuple[dict[str, Any], ...] = (
    {
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_speculation_details": True,
    },
    {"stream_options": {"include_usage": True}},
    {},
)
REFUSED = (400, 422)
JSON = {"content-type": "application/json"}
MAX_ERROR_CHARS = 200
_decode = msgspec.json.decode


class BenchError(Exception):
    """The benchmark cannot run. The message is one clear sentence."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What every request of a run asks for."""

    output_tokens: int
    chat: bool = True
    temperature: float = 0.0
    ignore_eos: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request body but for model and extras."""
        body = prompt.body(chat=self.chat) | {
            "stream": True,
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.fields)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server under test."""

    label: str
    url: str
    api_key: str = ""
    model: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)

    def client(self, timeout: float) -> httpx.AsyncClient:
        """Connections to it: as many as needed, kept, never through a proxy."""
        headers = {"accept-encoding": "identity"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        return httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0),
            trust_env=False,
        )


class AnswerError(Exception):
    """A request failed; the message is short and has no varying parts, so that equal failures count together."""

    def __init__(self, message: str, status: int = 0, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = int(retry_after) if retry_after is not None and retry_after.isdigit() else None


def describe(error: httpx.HTTPError | httpx.InvalidURL) -> str:
    """A transport failure in few words."""
    return f"{type(error).__name__}: {error}".rstrip(": ")[:MAX_ERROR_CHARS]


def error_message(body: bytes) -> str:
    """The message of an OpenAI error body, or its first characters."""
    try:
        data = _decode(body)
        error = data["error"] if isinstance(data, dict) and "error" in data else data
        message = error["message"] if isinstance(error, dict) and "message" in error else error
    except msgspec.DecodeError:
        message = body.decode(errors="replace")
    return " ".join(str(message).split())[:MAX_ERROR_CHARS]


class EventBuffer:
    """Bytes to the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Reader:
    """Takes the chunks of one stream and remembers what the sample needs."""

    def __init__(self) -> None:
        self.emissions: list[Emission] = []
        self.text: list[str] = []
        self.finish: str | None = None
        self.usage: dict[str, Any] = {}
        self.done = False
        self._events = EventBuffer()

    def read(self, data: bytes, at: float) -> None:
        """One read from the socket: everything in it arrived at once."""
        emitted, tokens, known = False, 0, True
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self.done = True
                continue
            chunk = self._chunk(event)
            choices = chunk.get("choices")
            for choice in choices if isinstance(choices, list) else ():
                if not isinstance(choice, dict):
                    raise AnswerError("a choice of the stream is not an object")
                text, ids = self._content(choice)
                if not text and not ids:
                    continue
                emitted = True
                known = known and ids is not None
                tokens += len(ids or ())
        if emitted:
            self.emissions.append(Emission(at, tokens if known else None))

    def _chunk(self, event: bytes) -> dict[str, Any]:
        try:
            chunk = _decode(event)
        except msgspec.DecodeError:
            raise AnswerError("an event of the stream is not JSON") from None
        if not isinstance(chunk, dict):
            raise AnswerError("an event of the stream is not an object")
        if chunk.get("error"):
            raise AnswerError(f"in the stream: {error_message(event)}")
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        return chunk

    def _content(self, choice: dict[str, Any]) -> tuple[str, list[int] | None]:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            parts = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
            calls = delta.get("tool_calls")
            parts += [str(calls)] if calls else []
        else:
            parts = [choice.get("text")]
        text = "".join(part for part in parts if isinstance(part, str))
        self.text.append(text)
        self.finish = choice.get("finish_reason") or self.finish
        ids = choice.get("token_ids")
        return text, ids if isinstance(ids, list) else None

    def counts(self) -> dict[str, int | None]:
        """The token counts of the usage object."""
        extension = self.usage.get("speculation")
        speculation = extension if isinstance(extension, dict) else {}
        found = {
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "completion_tokens": self.usage.get("completion_tokens"),
            "drafted": speculation.get("drafted_tokens"),
            "accepted": speculation.get("accepted_tokens"),
        }
        return {name: value if isinstance(value, int) else None for name, value in found.items()}


async def stream(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], reader: Reader) -> None:
    """Runs one request into the reader; raises AnswerError."""
    try:
        async with client.stream("POST", path, content=msgspec.json.encode(body), headers=JSON) as response:
            if response.status_code != 200:
                message = error_message(await response.aread())
                retry_after = response.headers.get("retry-after")
                raise AnswerError(f"HTTP {response.status_code}: {message}", response.status_code, retry_after)
            async for data in response.aiter_bytes():
                reader.read(data, time.perf_counter())
    except httpx.HTTPError as error:
        raise AnswerError(describe(error)) from error
    if not reader.done:
        raise AnswerError("the stream ended without [DONE]")
    if not reader.emissions:
        raise AnswerError("the answer is empty")


async def ask(client: httpx.AsyncClient, target: Target, what: Ask, prompt: Prompt, index: int) -> Sample:
    """One request, whatever comes of it."""
    body = {"model": target.model} | what.body(prompt) | dict(target.extras)
    reader = Reader()
    failure: AnswerError | None = None
    started = time.perf_counter()
    try:
        await stream(client, ROUTES[what.chat], body, reader)
    except AnswerError as raised:
        failure = raised
    return Sample(
        prompt=index,
        started=started,
        ended=time.perf_counter(),
        emissions=tuple(reader.emissions),
        text="".join(reader.text),
        finish=reader.finish,
        error=None if failure is None else str(failure),
        status=200 if failure is None else failure.status,
        retry_after=None if failure is None else failure.retry_after,
        **reader.counts(),
    )


async def model_of(client: httpx.AsyncClient, target: Target) -> str:
    """The first model the server lists."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(_decode(response.content)["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        message = error_message(error.response.content)
        raise BenchError(f"{target.url}/v1/models answers {error.response.status_code}: {message}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(f"{target.url} cannot be reached ({describe(error)}).") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise BenchError(f"{target.url}/v1/models lists no model; name one with --model.") from error


async def introduce(client: httpx.AsyncClient, target: Target, what: Ask, prompt: Prompt) -> Target:
    """The target with its model and the extras it takes; one short request shows that it works."""
    model = target.model or await model_of(client, target)
    body = {"model": model} | what.body(prompt) | {"max_tokens": min(2, what.output_tokens)}
    for extras in EXTRAS:
        try:
            await stream(client, ROUTES[what.chat], body | extras, Reader())
        except AnswerError as failure:
            if failure.status in REFUSED and extras:
                continue
            raise BenchError(f"{target.url} does not answer a request: {failure}.") from failure
        return Target(label=target.label, url=target.url, api_key=target.api_key, model=model, extras=extras)
    raise AssertionError("the last extras are empty")
