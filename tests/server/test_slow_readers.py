"""A client that keeps its connection and does not read holds a bounded buffer for a bounded time, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import select
import socket
import time
from collections.abc import Iterator

import pytest

from runtime.api import CancelReason, Request
from server.serve import limit_unread
from tests.server.live import PATIENCE, LiveServer, live, wait_until
from tests.support.fake_engine import FakeEngine

LIMIT = 0.4
KERNEL_BYTES = 4096  # what the kernel may hold of a connection, on either side; it doubles that
BIG = {"prompt": [5] * 20, "ignore_eos": True, "max_tokens": 2000, "logprobs": 20, "return_token_ids": True}


def endless(_request: Request) -> Iterator[int]:
    """Tokens with text: what has none is not sent before some comes."""
    return itertools.repeat(5)


def ask(server: LiveServer, *, stream: bool) -> socket.socket:
    """A request for half a megabyte, of which the kernel takes little."""
    body = json.dumps(BIG | {"stream": stream}).encode()
    connection = socket.socket()
    for end, option in ((connection, socket.SO_RCVBUF), (server.listener, socket.SO_SNDBUF)):
        end.setsockopt(socket.SOL_SOCKET, option, KERNEL_BYTES)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    return connection


def nothing_is_left(server: LiveServer) -> bool:
    return (
        len(server.service.admission) == 0
        and server.service.link.open_requests() == 0
        and not server._server.server_state.connections
    )


@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_is_cut_off(stream: bool) -> None:
    with live(FakeEngine(script=endless), write_timeout=LIMIT) as server, ask(server, stream=stream) as connection:
        wait_until(lambda: len(server.engine.requests) == 1)
        wait_until(lambda: nothing_is_left(server))
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                received += len(part)
                assert b"data: [DONE]" not in part
        assert received < 300_000


def test_what_is_still_computed_for_them_is_taken_back() -> None:
    engine = FakeEngine(freeze_after=1500, script=endless)
    with live(engine, write_timeout=LIMIT) as server, ask(server, stream=True):
        assert engine.cancelled.wait(PATIENCE)
        wait_until(lambda: nothing_is_left(server))
        assert [reason for _, reason, _ in engine.cancels] == [CancelReason.CLIENT_GONE]


def test_a_slow_reader_who_reads_gets_everything() -> None:
    """Its buffer is full again and again, each time for less than the limit."""
    with live(FakeEngine(script=endless), write_timeout=5.0) as server, ask(server, stream=True) as connection:
        received = b""
        while b"data: [DONE]" not in received[-100:]:
            received += connection.recv(65536)
            time.sleep(0.001)
        assert received.count(b'"finish_reason":"length"') == 1


def test_the_end_waits_for_what_is_written_but_not_read() -> None:
    with live(FakeEngine(script=endless)) as server, ask(server, stream=True) as connection:
        wait_until(lambda: any(c.flow.write_paused for c in server._server.server_state.connections))
        flushed = asyncio.run_coroutine_threadsafe(server._server.flushed(), server._loop)
        with pytest.raises(TimeoutError):
            flushed.result(0.5)
        received = b""
        while b"data: [DONE]" not in received[-100:]:
            received += connection.recv(65536)
        flushed.result(PATIENCE)


def test_a_connection_that_is_closing_is_cut_off_by_the_kernel() -> None:
    """What is left in buffers after the last byte was written is not waited for either."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        limit_unread(listener, LIMIT)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
        client.connect(listener.getsockname())
        served, _ = listener.accept()
        served.setblocking(False)
        with client, served:
            poller = select.poll()
            poller.register(served, select.POLLERR | select.POLLHUP)
            began = time.monotonic()
            with contextlib.suppress(BlockingIOError):
                while True:
                    served.send(b"x" * 65536)
            assert poller.poll(PATIENCE * 1000)
            assert time.monotonic() - began < 10 * (LIMIT + 1)
            assert served.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
