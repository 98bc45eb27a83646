"""The real server's life: saturated, left by its clients, stopped, spinning, killed, and asked to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Served

STALL = 3.0
PROMISED = STALL + 1.0  # seconds until /live falls
BOUND = 10 * PROMISED
SETTINGS = (
    *("--threads", "1", "--max-num-seqs", "16", "--stall-timeout", str(STALL)),
    *("--engine-restart-backoff", "0.1", "--log-level", "error"),
)
LONG_PROMPT = [300 + i % 800 for i in range(1800)]  # several steps long
RUN = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One for all; the last test ends it."""
    served = Served(*SETTINGS)
    yield served
    served.process.kill()
    print(served.process.communicate()[0])  # shown when something failed


@dataclass
class Told:
    """What came of one stream."""

    tokens: list[int] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False


async def lines(client: httpx.AsyncClient, told: Told, **body: Any) -> AsyncIterator[Told]:
    """A stream, with what it told up to each event."""
    async with client.stream("POST", "/v1/completions", json={**RUN, "stream": True, **body}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                told.done = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                told.error = event.get("error", told.error)
                told.tokens += [token for choice in event.get("choices", ()) for token in choice["token_ids"]]
            yield told


async def listen(client: httpx.AsyncClient, told: Told, **body: Any) -> Told:
    """A stream to its end."""
    async for _ in lines(client, told, **body):
        pass
    return told


def client_of(server: Served) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits)


async def until(condition: Any, seconds: float = BOUND) -> float:
    """Waits for a condition; returns how long that took."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < seconds, "did not happen in time"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def status(client: httpx.AsyncClient, path: str) -> int:
    return (await client.get(path)).status_code


def in_use(server: Served) -> dict[str, float]:
    """The gauges of what requests hold that are not 0."""
    names = ("requests_running", "requests_waiting", "requests_waiting_tokens", "kv_blocks", "state_slots")
    own = {f"lockstep_{name}" for name in names}
    return {
        name: value
        for name, value in server.metrics().items()
        if name.split("{")[0] in own and value and ("requests_" in name or 'state="used"' in name)
    }


def complete(server: Served, **body: Any) -> list[int]:
    response = httpx.post(f"{server.url}/v1/completions", json={**RUN, **body}, timeout=120)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


async def saturate(server: Served, seconds: float) -> list[int]:
    """More work than fits, long prompts among it, for so long; what /live said meanwhile."""
    said: list[int] = []

    async def work(number: int, client: httpx.AsyncClient) -> None:
        source = random.Random(number)
        while True:
            length = source.choice([1, 200, 1800])
            await listen(client, Told(), prompt=LONG_PROMPT[-length:], max_tokens=source.choice([1, 40, 200]))

    async with client_of(server) as client:
        workers = [asyncio.create_task(work(number, client)) for number in range(32)]
        await until(lambda: waiting(client))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            said.append(await status(client, "/live"))
            await asyncio.sleep(0.1)
        for worker in workers:
            worker.cancel()
        ended = await asyncio.gather(*workers, return_exceptions=True)
    assert {type(end) for end in ended} == {asyncio.CancelledError}  # until then nobody was refused
    return said


async def waiting(client: httpx.AsyncClient) -> bool:
    lines = (await client.get("/metrics")).text.splitlines()
    return any(float(line.rpartition(" ")[2]) > 0 for line in lines if line.startswith("lockstep_requests_waiting{"))


def test_a_saturated_engine_is_alive(server: Served) -> None:
    said = asyncio.run(saturate(server, 2 * STALL))
    assert len(said) > 5
    assert set(said) == {200}
    assert server.total("lockstep_engine_restarts_total") == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_minutes_of_saturation() -> None:
    server = Served(*SETTINGS)
    try:
        assert set(asyncio.run(saturate(server, 600.0))) == {200}
        assert server.total("lockstep_engine_restarts_total") == 0
        asyncio.run(until(lambda: asyncio.sleep(0, in_use(server) == {})))
    finally:
        assert server.stop() == 0


async def leave(server: Served, number: int) -> None:
    """One client that leaves: before the answer, in the middle of it, politely or not."""
    source = random.Random(number)
    body = {**RUN, "prompt": LONG_PROMPT[: source.choice([1, 7, 300])], "max_tokens": 200, "stream": number % 3 > 0}
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(data), data)
    )
    await writer.drain()
    if number % 3 == 1:
        await reader.read(1)
    await asyncio.sleep(source.choice([0.0, 0.0, 0.05]))
    if number % 2:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def test_500_clients_that_leave_leave_nothing_behind(server: Served) -> None:
    async def all_of_them() -> None:
        gate = asyncio.Semaphore(100)

        async def one(number: int) -> None:
            async with gate:
                await leave(server, number)

        await asyncio.gather(*(one(number) for number in range(500)))

    async def nothing() -> bool:
        return in_use(server) == {} and server.total("lockstep_http_requests_in_progress") == 1  # this one

    accepted, ended = server.total("lockstep_request_max_tokens_count"), server.total("lockstep_requests_total")
    assert accepted == ended
    asyncio.run(all_of_them())
    asyncio.run(until(nothing))
    accepted, ended = server.total("lockstep_request_max_tokens_count"), server.total("lockstep_requests_total")
    assert accepted == ended
    assert accepted > 100
    assert server.total("lockstep_state_commit_missing_total") == 0


def test_a_stopped_engine_is_not_alive_and_loses_nothing_when_it_goes_on(server: Served) -> None:
    async def scenario() -> Told:
        async with client_of(server) as client:
            told = Told()
            stream = asyncio.create_task(listen(client, told, prompt=[300, 301], max_tokens=600))
            await until(lambda: asyncio.sleep(0, bool(told.tokens)))
            os.kill(server.engine, signal.SIGSTOP)
            try:
                took = await until(lambda: dead(client))
                assert took > STALL / 2
                assert await status(client, "/ready") == 503
                refused = await client.post("/v1/completions", json={"prompt": [300]})
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                assert not told.done
            finally:
                os.kill(server.engine, signal.SIGCONT)
            await until(lambda: ready(client))
            return await stream

    told = asyncio.run(scenario())
    assert told.done
    assert told.error is None
    assert len(told.tokens) == 600
    assert server.total("lockstep_engine_restarts_total") == 0


async def dead(client: httpx.AsyncClient) -> bool:
    return await status(client, "/live") == 503


async def ready(client: httpx.AsyncClient) -> bool:
    return await status(client, "/ready") == 200


def test_a_killed_engine_ends_what_it_had_and_another_goes_on(server: Served) -> None:
    text = complete(server, prompt=[300, 301], max_tokens=20)
    before = server.metrics()
    (started,) = (value for name, value in before.items() if 'phase="total"' in name)

    async def scenario() -> Told:
        async with client_of(server) as client:
            told = Told()
            stream = asyncio.create_task(listen(client, told, prompt=[300, 301], max_tokens=1900))
            await until(lambda: asyncio.sleep(0, bool(told.tokens)))
            os.kill(server.engine, signal.SIGKILL)
            await stream
            assert await status(client, "/live") == 200
            await until(lambda: ready(client), 10 * started)
            return told

    told = asyncio.run(scenario())
    assert told.done
    assert told.error is not None
    assert told.error["code"] == "server_is_overloaded"
    assert len(told.tokens) < 1900
    assert complete(server, prompt=[300, 301], max_tokens=20) == text
    after = server.metrics()
    counters = [name for name in before if name.split("{")[0].endswith(("_total", "_count", "_bucket", "_sum"))]
    assert [name for name in counters if after[name] < before[name]] == []
    assert server.total("lockstep_engine_restarts_total") == 1
    assert in_use(server) == {}


def test_a_spinning_engine_is_not_alive() -> None:
    server = Served(*SETTINGS, command=("tests.e2e.spinning_serve",))

    async def scenario() -> Told:
        async with client_of(server) as client:
            told = Told()
            stream = asyncio.create_task(listen(client, told, prompt=[300], max_tokens=1900))
            await until(lambda: asyncio.sleep(0, bool(told.tokens)))
            spinning = asyncio.create_task(client.post("/v1/completions", json={"prompt": [13, 13, 13]}))
            await until(lambda: dead(client))
            assert await status(client, "/ready") == 503
            server.process.send_signal(signal.SIGTERM)  # what Kubernetes does next; it does not wait for the engine
            assert (await spinning).status_code == 503
            return await stream

    try:
        told = asyncio.run(scenario())
        assert told.done
        assert told.error is not None
        server.process.communicate(timeout=BOUND)
        assert server.process.returncode == 0
    finally:
        server.process.kill()
        server.process.communicate()


def test_sigterm_loses_no_stream(server: Served) -> None:
    """Last in this file: it ends the server."""

    async def scenario() -> list[Told]:
        async with client_of(server) as client:
            told = [Told() for _ in range(4)]
            streams = [
                asyncio.create_task(listen(client, each, prompt=[300, 301, 302 + i], max_tokens=300 + i))
                for i, each in enumerate(told)
            ]
            await until(lambda: asyncio.sleep(0, all(each.tokens for each in told)))
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: not_ready(client))
            assert not any(each.done for each in told)
            refused = await client.post("/v1/completions", json={"prompt": [300]})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
            assert await status(client, "/live") == 200
            return await asyncio.gather(*streams)

    told = asyncio.run(scenario())
    assert [len(each.tokens) for each in told] == [300, 301, 302, 303]
    assert all(each.done and each.error is None for each in told)
    server.process.communicate(timeout=BOUND)
    assert server.process.returncode == 0


async def not_ready(client: httpx.AsyncClient) -> bool:
    return await status(client, "/ready") == 503
