"""The HTTP server underneath: uvicorn, with our limits and without its signal handling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import uvicorn
import uvloop
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.logs import event
from server.settings import Settings

KEEP_ALIVE_SECONDS = 75
HEAD_SECONDS = 30.0
WRITE_BUFFER_BYTES = 64 * 1024
FLUSH_SECONDS = 0.05
MAX_HEAD_BYTES = 128 * 1024
HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
)
HEAD_TOO_LARGE_BODY = (
    b'{"error":{"message":"The request headers are too large.","type":"invalid_request_error","param":null,'
    b'"code":"request_headers_too_large"}}'
)
_log = logging.getLogger(__name__)


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop this process runs on."""
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class BoundedHttp(HttpToolsProtocol):
    """Gives up on a client that sends a head without end, or that does not read what it is sent.

    A response waits while `WRITE_BUFFER_BYTES` of it are unread, and goes on when a quarter of them is left. That may
    take `write_timeout` seconds; then the connection is cut, and what was computed for it is taken back.
    """

    write_timeout: float
    _write_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Refuses a head that is too large before it is collected."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self._responding():
                self.cycle.keep_alive = False  # the answer that is running ends whole, and the connection with it
                self.flow.pause_reading()
                return
            length = b"content-length: %d\r\n\r\n" % len(HEAD_TOO_LARGE_BODY)
            self.transport.write(HEAD_TOO_LARGE + length + HEAD_TOO_LARGE_BODY)
            self.transport.close()

    def _responding(self) -> bool:
        """Whether an answer to an earlier request is still being written."""
        return self.cycle is not None and not self.cycle.response_complete

    def _head_is_late(self) -> None:
        if self._responding():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        else:
            self.transport.close()

    def _head_is_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The buffer gets its bounds. What is left in it when a response is complete is the kernel's to time out."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES, WRITE_BUFFER_BYTES // 4)

    def pause_writing(self) -> None:
        """The buffer is full."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout, self._write_is_late)

    def resume_writing(self) -> None:
        """There is room again."""
        self._write_is_done()
        super().resume_writing()

    def _write_is_late(self) -> None:
        event(_log, logging.WARNING, "client stopped reading", seconds=self.write_timeout)
        self.transport.abort()

    def _write_is_done(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """No head will come, and nothing is read any more."""
        self._write_is_done()
        self._head_is_done()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A new head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head ends."""
        self._in_head = False
        self._head_is_done()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next byte belongs to another head."""
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0


class WebServer(uvicorn.Server):
    """Leaves signals alone; `Run` decides when to stop."""

    async def flushed(self) -> None:
        """Ends once the kernel has all that was written to any connection."""
        while any(each.transport.get_write_buffer_size() for each in self.server_state.connections):
            await asyncio.sleep(FLUSH_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


def web_server(app: FastAPI, limits: Settings) -> WebServer:
    """The server for an application; it is told its sockets when it starts."""

    class Http(BoundedHttp):
        write_timeout = limits.write_timeout

    config = uvicorn.Config(
        app,
        http=Http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        backlog=2048,
    )
    return WebServer(config)
