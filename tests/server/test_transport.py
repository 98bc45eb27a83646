"""Keys, request ids, limits, connections: what happens around a request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from server.app import create_app
from server.auth import OPEN_PATHS, Keys
from server.inline_link import InlineLink
from server.service import Service
from server.settings import Settings
from tests.server.live import CHAT, COMPLETIONS, PATIENCE, LiveServer, live
from tests.support.fake_engine import FakeEngine

PROBES = ["/live", "/ready", "/health", "/metrics"]


def all_routes() -> list[tuple[str, str]]:
    app = create_app(Service(Settings(api_key=("k",)), InlineLink(FakeEngine())))
    return [(method, route.path) for route in app.routes for method in sorted(route.methods or ())]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    with live(api_key=("secret", "other")) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), all_routes())
def test_everything_but_the_probes_needs_a_key(keyed: LiveServer, method: str, path: str) -> None:
    headers: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic secret"},
        {"authorization": "secret"},
        {"authorization": "Bearer"},
    ]
    for header in headers:
        response = keyed.http.request(method, path.replace("{model_id:path}", "x"), headers=header)
        if path in OPEN_PATHS:
            assert response.status_code == 200
        else:
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
    for key in ("Bearer secret", "bearer  other"):
        response = keyed.http.request(method, path.replace("{model_id:path}", "x"), headers={"authorization": key})
        assert response.status_code != 401


def test_unknown_routes_need_a_key_too() -> None:
    with live(api_key=("secret",)) as server:
        for path in ("/nope", "/docs", "/openapi.json", "/v1", "//live", "/live/../v1/models", "/LIVE"):
            response = server.http.get(path)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert server.http.options(CHAT).status_code == 405
        assert server.metrics()['lockstep_requests_rejected_total{model_name="lockstep-tiny",reason="auth"}'] == 7


def test_no_keys_means_open() -> None:
    assert Keys(()).allow("/v1/models", None)


@pytest.mark.parametrize("path", PROBES)
def test_head_works(shared: LiveServer, path: str) -> None:
    response = shared.http.head(path)
    assert response.status_code == 200
    assert response.content == b""
    assert shared.http.head("/v1/models").status_code == 200


def test_request_ids(shared: LiveServer) -> None:
    for path in ("/live", "/nope", "/v1/models"):
        assert shared.http.get(path).headers["x-request-id"].startswith("req-")
    assert shared.http.get("/live", headers={"x-request-id": "my.id_1-2"}).headers["x-request-id"] == "my.id_1-2"
    for bad in ("a b", "x" * 129, "<script>", ""):
        assert shared.http.get("/live", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req-")


def test_body_limit_by_header_and_by_counting() -> None:
    with live(max_body_bytes=2000) as server:
        body = json.dumps({"prompt": "a" * 3000}).encode()
        json_type = {"content-type": "application/json"}
        for content in (body, (body[i : i + 100] for i in range(0, len(body), 100))):
            response = server.http.post(COMPLETIONS, content=content, headers=json_type)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        assert server.complete("a").status_code == 200


def test_a_length_beyond_reason_is_refused_at_once(shared: LiveServer) -> None:
    answer = shared.raw(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 99999999999\r\n\r\n{"
    )
    assert answer.startswith(b"HTTP/1.1 413")


def test_chunked_bodies_work(shared: LiveServer) -> None:
    body = json.dumps({"prompt": "abc"}).encode()
    response = shared.http.post(
        COMPLETIONS, content=(bytes([byte]) for byte in body), headers={"content-type": "application/json"}
    )
    assert response.json()["choices"][0]["text"] == "abc"


def test_a_slow_body_times_out() -> None:
    with live(body_timeout=0.05) as server:
        answer = server.raw(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{"
        )
        assert answer.startswith(b"HTTP/1.1 400")
        assert len(server.service.admission) == 0


@pytest.mark.parametrize("size", [80_000, 300_000, 2_000_000])
def test_huge_heads_are_refused(shared: LiveServer, size: int) -> None:
    answer = shared.raw(b"GET /live HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * size + b"\r\n\r\n")
    assert b" 431 " in answer.split(b"\r\n")[0] or answer == b""


def test_a_normal_head_after_many_requests_on_one_connection(shared: LiveServer) -> None:
    with httpx.Client(base_url=shared.url, timeout=PATIENCE) as client:
        for _ in range(40):
            assert client.get("/live", headers={"x-pad": "a" * 8000}).status_code == 200


def test_garbage_is_400(shared: LiveServer) -> None:
    assert shared.raw(b"\x16\x03\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_keep_alive_survives_errors(shared: LiveServer) -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    with socket.create_connection(("127.0.0.1", shared.port), timeout=PATIENCE) as connection:
        for _ in range(3):
            connection.sendall(request)
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_expect_100_continue(shared: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 100")
        connection.sendall(b"{}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_models(shared: LiveServer) -> None:
    listed = shared.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("lockstep-tiny", "model", 2048)
    assert shared.http.get("/v1/models/lockstep-tiny").json() == model


@pytest.mark.parametrize("path", ["org/name", "org%2Fname"])
def test_model_names_with_slashes(path: str) -> None:
    with live(served_model_name="org/name") as server:
        assert server.http.get(f"/v1/models/{path}").json()["id"] == "org/name"
        assert server.chat(model="org/name").json()["model"] == "org/name"


def test_no_cors_by_default(shared: LiveServer) -> None:
    response = shared.http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_versions_of_the_web_server_are_not_shown(shared: LiveServer) -> None:
    assert "server" not in shared.http.get("/live").headers


def test_a_head_that_never_ends_is_cut(shared: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.webserver.HEAD_SECONDS", 0.05)
    assert shared.raw(b"GET /live HTTP/1.1\r\nx-a: ") == b""
    assert shared.http.get("/live").status_code == 200
