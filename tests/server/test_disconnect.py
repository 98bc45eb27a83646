"""A client that leaves takes its request with it, streaming or not.

The engine is frozen meanwhile, so nothing but the disconnect can end the request; there is no polling to wait for.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

import pytest

from runtime.api import CancelReason
from server.link import UnavailableError
from server.prompt import PromptEncoder
from tests.server.live import CHAT, COMPLETIONS, PATIENCE, LiveServer, live, parse_sse, wait_until
from tests.support.fake_engine import FakeEngine


def send(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    data = json.dumps({"prompt": [5] * 20, "ignore_eos": True, "max_tokens": 2000} | body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(data), data)
    )
    return connection


def gone(server: LiveServer) -> bool:
    return len(server.service.admission) == 0 and server.service.link.open_requests() == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_frees_the_engine(stream: bool, how: str) -> None:
    engine = FakeEngine(freeze_after=8)
    with live(engine) as server:
        connection = send(server, {"stream": stream})
        if stream:
            assert connection.recv(65536)
        else:
            wait_until(lambda: bool(engine.requests))
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        assert engine.cancelled.wait(PATIENCE)
        wait_until(lambda: gone(server))
        ((_, reason, keep),) = engine.cancels
        assert reason is CancelReason.CLIENT_GONE
        assert keep <= 12
        assert server.metrics()['lockstep_requests_total{finish_reason="abort",model_name="lockstep-tiny"}'] == 1
        engine.freeze_after = None
        engine.release()
        assert server.complete("still here").json()["choices"][0]["text"] == "still here"


def test_a_client_that_leaves_the_queue(server: LiveServer) -> None:
    server.engine.max_running = 0
    connection = send(server, {})
    wait_until(lambda: bool(server.engine.requests))
    connection.close()
    assert server.engine.cancelled.wait(PATIENCE)
    wait_until(lambda: gone(server))


def test_a_client_that_leaves_while_its_prompt_is_put_into_tokens(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    encode = PromptEncoder.encode_text

    def slow(self: PromptEncoder, text: str, max_len: int) -> list[int]:
        entered.set()
        assert go_on.wait(PATIENCE)
        return encode(self, text, max_len)

    monkeypatch.setattr(PromptEncoder, "encode_text", slow)
    server.engine.hold()
    connection = send(server, {"prompt": "a", "user": "x" * 20_000})
    assert entered.wait(PATIENCE)
    assert len(server.service.admission) == 1
    connection.close()
    go_on.set()
    wait_until(lambda: gone(server))
    assert {name for name, _, _ in server.engine.cancels} >= {request.id for request in server.engine.requests}


def test_a_client_that_leaves_in_the_middle_of_its_body(server: LiveServer) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b'content-length: 500\r\n\r\n{"prompt": "a'
    )
    wait_until(lambda: len(server.service.admission) == 1)
    connection.close()
    wait_until(lambda: gone(server))
    assert not server.engine.requests


def test_a_client_that_leaves_takes_every_choice(server: LiveServer) -> None:
    server.engine.hold()
    connection = send(server, {"n": 3})
    wait_until(lambda: len(server.engine.requests) == 3)
    connection.close()
    wait_until(lambda: gone(server))
    assert len(server.engine.cancels) == 3


def test_many_disconnects_then_a_normal_request(server: LiveServer) -> None:
    server.engine.hold()
    connections = [send(server, {"stream": bool(index % 2)}) for index in range(40)]
    wait_until(lambda: len(server.engine.requests) == 40)
    for connection in connections:
        connection.close()
    wait_until(lambda: gone(server))
    server.engine.release()
    assert server.complete("ok").json()["choices"][0]["text"] == "ok"


def test_a_slow_reader_does_not_stop_the_others(server: LiveServer) -> None:
    slow = send(server, {"stream": True, "return_token_ids": True, "logprobs": 20, "max_tokens": 300})
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for _ in range(5):
        assert server.complete("quick").json()["choices"][0]["text"] == "quick"
    received = b""
    while b"[DONE]" not in received:
        received += slow.recv(65536)
    slow.close()
    assert received.count(b'"finish_reason":"length"') == 1
    wait_until(lambda: gone(server))


def test_running_streams_finish_while_draining(server: LiveServer) -> None:
    server.engine.hold()
    answers: list[str] = []

    def read() -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
        answers.append(server.http.post(CHAT, json=body).text)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    wait_until(lambda: len(server.engine.requests) == 4)
    server.call(server.service.drain)
    assert server.chat().status_code == 503
    server.engine.release()
    for reader in readers:
        reader.join(PATIENCE)
    assert [parse_sse(text)[-1]["choices"][0]["finish_reason"] for text in answers] == ["stop"] * 4


def test_what_is_cut_off_says_so(server: LiveServer) -> None:
    server.engine.freeze_after = 4
    connection = send(server, {"stream": True})
    assert b"200 OK" in connection.recv(65536)
    server.call(lambda: server.service.admission.interrupt(UnavailableError("The server is shutting down.")))
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(65536)
    connection.close()
    assert b'"server_is_overloaded"' in received
    assert b'"finish_reason":"' not in received
    wait_until(lambda: gone(server))
    assert server.engine.cancels[0][1] is CancelReason.SHUTDOWN


def test_64_streams_at_once_with_one_in_five_leaving(server: LiveServer) -> None:
    """Every survivor's answer is its own."""
    results: dict[int, str] = {}

    def survivor(index: int) -> None:
        prompt = f"request {index} " * (1 + index % 5)
        chunks = server.stream(COMPLETIONS, {"prompt": prompt, "max_tokens": 500})
        results[index] = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    def leaver(index: int) -> None:
        connection = send(server, {"stream": True})
        connection.recv(1 + index)
        connection.close()

    threads = [threading.Thread(target=leaver if index % 5 == 0 else survivor, args=(index,)) for index in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == {index: f"request {index} " * (1 + index % 5) for index in range(64) if index % 5}
    wait_until(lambda: gone(server))
