"""A real uvicorn in a thread around a scripted engine, and what tests want to say to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from server.app import create_app
from server.inline_link import InlineLink
from server.serve import bind
from server.service import Service
from server.settings import Settings
from server.tracing import Tracing
from server.webserver import WebServer, event_loop, web_server
from tests.support.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATIENCE = 60.0  # seconds for what takes milliseconds on a machine that is not busy with something else


class LiveServer:
    def __init__(self, engine: FakeEngine, tracing: Tracing | None = None, **settings: Any) -> None:
        self.engine = engine
        self._tracing = tracing
        self.settings = Settings(speculative="mtp:3", port=0, **settings).resolved()
        self.listener = bind(self.settings.host, self.settings.port)
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.service: Service
        self._server: WebServer
        self._loop: asyncio.AbstractEventLoop

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.engine.release()
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(PATIENCE)
        self.listener.close()

    def _stop(self) -> None:
        self.service.interrupt()
        self._server.should_exit = True

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.service = Service(self.settings, InlineLink(self.engine), self._tracing)
        await self.service.start()
        self._server = web_server(create_app(self.service), self.settings)
        self._ready.set()
        await self._server.serve(sockets=[self.listener])
        await self.service.link.close()

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function on the server's loop."""
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(PATIENCE)

    def chat(self, content: str = "Hello there", **fields: Any) -> httpx.Response:
        return self.http.post(CHAT, json={"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "Hello there", **fields: Any) -> httpx.Response:
        return self.http.post(COMPLETIONS, json={"prompt": prompt, **fields})

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All chunks of a stream that ends properly."""
        response = self.http.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        return parse_sse(response.text)

    def metrics(self) -> dict[str, float]:
        """The page as `name{labels}` -> value."""
        page = self.http.get("/metrics").text
        samples = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def raw(self, data: bytes) -> bytes:
        """Sends bytes and reads until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            connection.sendall(data)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    received += part
        return received


def parse_sse(text: str) -> list[dict[str, Any]]:
    """The chunks of a whole event stream; checks framing and the end."""
    assert text.endswith("data: [DONE]\n\n")
    frames = text.removesuffix("\n\n").split("\n\n")
    assert frames.count("data: [DONE]") == 1
    for frame in frames:
        assert frame.startswith("data: ")
        assert "\n" not in frame
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Polls what has no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


@contextlib.contextmanager
def live(engine: FakeEngine | None = None, tracing: Tracing | None = None, **settings: Any) -> Iterator[LiveServer]:
    with LiveServer(engine or FakeEngine(), tracing, **settings) as server:
        yield server
