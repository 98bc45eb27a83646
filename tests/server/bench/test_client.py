"""What servers may send, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from server.bench.client import EXTRAS, Ask, BenchError, EventBuffer, Reader, Target, ask, introduce
from server.bench.prompts import IdPrompts, TextPrompts
from server.bench.sample import Sample

TARGET = Target(label="a", url="http://a", model="m")
COMPLETE = Ask(output_tokens=5, chat=False, ignore_eos=True, fields={"cache_prompt": False})
PROMPTS = IdPrompts(length=3, vocab=50)
Handler = Callable[[httpx.Request], httpx.Response]


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def text(piece: str, ids: list[int] | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "text": piece, "finish_reason": None} | ({} if ids is None else {"token_ids": ids}) | fields
    return event({"choices": [choice]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
DONE = event(b"[DONE]")


def reply(body: bytes, status: int = 200) -> Handler:
    return lambda _: httpx.Response(status, content=body)


def asked(handler: Handler, what: Ask = COMPLETE) -> Sample:
    async def run() -> Sample:
        async with httpx.AsyncClient(base_url="http://a", transport=httpx.MockTransport(handler)) as client:
            return await ask(client, TARGET, what, PROMPTS(4), 4)

    return asyncio.run(run())


def introduced(handler: Handler, model: str = "m", what: Ask = COMPLETE) -> Target:
    async def run() -> Target:
        async with httpx.AsyncClient(base_url="http://a", transport=httpx.MockTransport(handler)) as client:
            return await introduce(client, Target(label="a", url="http://a", model=model), what, PROMPTS(0))

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_survive_any_split(size: int) -> None:
    data = b": comment\r\n\r\ndata: one\r\n\r\ndata:two\n\nevent: x\ndata: \xc3\xa4\n\ndata: rest"
    buffer = EventBuffer()
    found = [item for at in range(0, len(data), size) for item in buffer.feed(data[at : at + size])]
    assert found == [b"one", b"two", "ä".encode()]


def test_one_read_is_one_emission() -> None:
    reader = Reader()
    reader.read(event({"choices": [{"delta": {"role": "assistant", "content": ""}, "token_ids": []}]}), 0.5)
    reader.read(text("a", [1]) + text("bc", [2, 3]), 1.0)
    reader.read(text("", [4]), 2.0)
    reader.read(text("d", [], finish_reason="length") + USAGE + DONE, 3.0)
    assert [(each.at, each.tokens) for each in reader.emissions] == [(1.0, 3), (2.0, 1), (3.0, 0)]
    assert "".join(reader.text) == "abcd"
    assert reader.finish == "length"
    assert reader.done
    assert reader.counts() == {"prompt_tokens": 3, "completion_tokens": 5, "drafted": None, "accepted": None}


@pytest.mark.parametrize(
    "delta",
    [{"content": "x"}, {"reasoning_content": "x"}, {"reasoning": "x"}, {"tool_calls": [{"index": 0}], "content": None}],
)
def test_every_kind_of_content_is_an_emission(delta: dict[str, Any]) -> None:
    reader = Reader()
    reader.read(event({"choices": [{"delta": delta}]}), 1.0)
    assert [each.tokens for each in reader.emissions] == [None]


def test_the_request() -> None:
    bodies: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/completions"
        bodies.append(json.loads(request.content))
        return httpx.Response(200, content=text("a") + USAGE + DONE)

    found = asked(handler)
    assert found.error is None
    assert (found.prompt, found.prompt_tokens, found.completion_tokens) == (4, 3, 5)
    assert bodies == [
        {
            "model": "m",
            "prompt": list(PROMPTS(4).ids),
            "stream": True,
            "max_tokens": 5,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
    ]
    assert "messages" in Ask(output_tokens=1).body(TextPrompts()(0))
    assert "ignore_eos" not in Ask(output_tokens=1).body(TextPrompts()(0))


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (reply(b'{"error": {"message": "slow\\n down"}}', 429), "HTTP 429: slow down"),
        (reply(b'{"detail": "x"}', 500), "HTTP 500: {'detail': 'x'}"),
        (reply(b"<html>", 502), "HTTP 502: <html>"),
        (reply(text("a") + event({"error": {"message": "engine died"}}) + DONE), "in the stream: engine died"),
        (reply(text("a") + USAGE), "the stream ended without [DONE]"),
        (reply(USAGE + DONE), "the answer is empty"),
        (reply(event(b"{nonsense")), "an event of the stream is not JSON"),
        (reply(event(b"[1]")), "an event of the stream is not an object"),
        (reply(event({"choices": ["x"]})), "a choice of the stream is not an object"),
        (reply(event({"choices": 7, "usage": 3}) + DONE), "the answer is empty"),
    ],
)
def test_failures_are_samples(handler: Handler, error: str) -> None:
    found = asked(handler)
    assert found.error == error
    assert found.e2e >= 0


def test_a_broken_connection_is_a_sample() -> None:
    class Broken(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            yield text("a")
            raise httpx.ReadError("reset")

    found = asked(lambda _: httpx.Response(200, stream=Broken()))
    assert found.error == "ReadError: reset"
    assert len(found.emissions) == 1
    assert found.completion_tokens is None


def strict(refused: int) -> Handler:
    """A server that refuses the first `refused` sets of extras."""

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        body = json.loads(request.content)
        if any(extras.items() <= body.items() for extras in EXTRAS[:refused]):
            return httpx.Response(422, json={"error": "unexpected keys"})
        return httpx.Response(200, content=text("a") + DONE)

    return handler


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_extras_are_asked_for_as_far_as_the_server_takes_them(refused: int) -> None:
    assert introduced(strict(refused)).extras == EXTRAS[refused]
    assert introduced(strict(refused), model="").model == "served"


@pytest.mark.parametrize(
    ("handler", "model", "words"),
    [
        (reply(b'{"error": {"message": "no such key"}}', 401), "m", "no such key"),
        (reply(b'{"error": {"message": "bad"}}', 400), "m", "HTTP 400: bad"),
        (reply(b'{"error": {"message": "no such key"}}', 401), "", "answers 401: no such key"),
        (reply(b"{}"), "", "name one with --model"),
        (reply(b"<html>"), "", "name one with --model"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_sentence(handler: Handler, model: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        introduced(handler, model)
