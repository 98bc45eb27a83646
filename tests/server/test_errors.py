"""An error of each kind: its status, its envelope, its field; and that nothing of the inside is said."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from runtime.api import CapacityError, ConfigError, RequestError, StateError
from server.errors import ApiError, field_path, from_exception
from server.link import UnavailableError
from server.schema.common import SamplingFields
from tests.server.live import CHAT, COMPLETIONS, LiveServer, live, wait_until
from tests.support.fake_engine import VOCAB, FakeEngine

USER = [{"role": "user", "content": "hi"}]
INSIDE = re.compile(r"0x[0-9a-f]{4}|/[a-z]+/[a-z]+\.py|Traceback|/secret", re.IGNORECASE)


def check(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert not INSIDE.search(response.text)
    return error


BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", []),
    ("top_p", 1.5),
    ("top_p", -1),
    ("top_k", 1.0),
    ("top_k", -2),
    ("top_k", True),
    ("top_k", 2**63),
    ("min_p", 2),
    ("seed", 1.5),
    ("seed", 2**63),
    ("seed", "1"),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", True),
    ("n", 2**31),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 5.0),
    ("max_tokens", 10**30),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", []),
    ("stop", 5),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [99999]),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("model", 5),
    ("user", 5),
    ("include_stop_str_in_output", "no"),
    ("return_token_ids", 1),
    ("speculation", 3),
]
UNSUPPORTED: list[tuple[str, Any]] = [
    ("best_of", 2),
    ("prediction", {"type": "content", "content": "x"}),
    ("structured_outputs", {"regex": "a"}),
    ("guided_json", {}),
    ("regex", "a"),
    ("response_format", {"type": "json_object"}),
    ("prompt_logprobs", 1),
    ("continue_final_message", True),
    ("use_beam_search", True),
    ("echo", True),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("name", "value"), BAD_FIELDS + UNSUPPORTED)
def test_bad_values_name_their_field(shared: LiveServer, path: str, name: str, value: Any) -> None:
    prompt: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "x"}
    error = shared.http.post(path, json=prompt | {name: value}).json()["error"]
    assert error["param"] is not None
    assert error["param"].split("[")[0].split(".")[0] == name
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": True}}, "chat_template_kwargs"),
        ({"speculation": {"num_drafts": 8}}, "speculation.num_drafts"),
        ({"speculation": {"drafts": 1}}, "speculation.drafts"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [*USER, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
    ],
)
def test_bad_chat_requests(shared: LiveServer, fields: dict[str, Any], param: str) -> None:
    check(shared.http.post(CHAT, json={"messages": USER} | fields), 400, param)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        [],
        [[]],
        [""],
        "",
        [5, "a"],
        ["a", 5],
        [True],
        [-1],
        [1.0],
        [[1], "a"],
        [[1], []],
        [VOCAB],
        [[5], [VOCAB]],
    ],
)
def test_bad_prompts(shared: LiveServer, prompt: Any) -> None:
    check(shared.http.post(COMPLETIONS, json={"prompt": prompt}), 400, "prompt")


def test_too_many_choices(shared: LiveServer) -> None:
    check(shared.complete(["a"] * 129), 400, "prompt")
    check(shared.complete(["a"] * 100, n=2), 400, "n")
    check(shared.complete("a", suffix="b"), 400, "suffix")
    check(shared.complete("a", logprobs=21), 400, "logprobs")


@pytest.mark.parametrize(
    ("path", "body", "param", "number"),
    [
        (COMPLETIONS, {"prompt": [5] * 2048}, "prompt", "2048"),
        (COMPLETIONS, {"prompt": "a " * 3000}, "prompt", "3001"),
        (CHAT, {"messages": [{"role": "user", "content": "1" * 4000}]}, "messages", "40"),
    ],
)
def test_a_prompt_that_does_not_fit(
    shared: LiveServer, path: str, body: dict[str, Any], param: str, number: str
) -> None:
    error = check(shared.http.post(path, json=body), 400, param, "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in error["message"]
    assert number in error["message"]


def test_unknown_model(shared: LiveServer) -> None:
    check(shared.chat(model="gpt-4"), 404, "model", "model_not_found")
    check(shared.http.get("/v1/models/gpt-4"), 404, "model", "model_not_found")
    check(shared.http.get("/v1/models/a/b"), 404, "model", "model_not_found")


def test_embeddings_are_refused(shared: LiveServer) -> None:
    check(shared.http.post("/v1/embeddings", json={"input": "x"}), 400, "model")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/live", 405),
        ("GET", "/v1/chat/completions/", 404),
    ],
)
def test_unknown_routes_and_methods(shared: LiveServer, method: str, path: str, status: int) -> None:
    response = shared.http.request(method, path)
    check(response, status, None)
    assert status != 405 or response.headers["allow"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'{"prompt":"a"} x',
        b"\xff\xfe",
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":"a","x":' + b"[" * 50_000,
        b'{"prompt":"a","x":' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bad_json(shared: LiveServer, path: str, body: bytes) -> None:
    check(shared.http.post(path, content=body, headers={"content-type": "application/json"}), 400, None)


NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "timeout"]
NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', '"Infinity"']


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize("field", [*NUMBERS, "logit_bias"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_not_finite_never_reaches_the_engine(shared: LiveServer, path: str, field: str, number: str) -> None:
    start = json.dumps({"messages": USER} if path == CHAT else {"prompt": "x"})[:-1]
    value = f'{{"5": {number}}}' if field == "logit_bias" else number
    body = f'{start}, "{field}": {value}}}'.encode()
    seen = len(shared.engine.requests)
    response = shared.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(shared.engine.requests) == seen


def test_every_number_is_tried() -> None:
    floats = {name for name, field in SamplingFields.model_fields.items() if "float" in str(field.annotation)}
    assert floats - {"logit_bias"} == set(NUMBERS)


def test_a_number_of_400_digits(shared: LiveServer) -> None:
    body = b'{"prompt":"a","max_tokens":' + b"9" * 400 + b"}"
    check(shared.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}), 400, "max_tokens")
    body = b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}"
    check(shared.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}), 400, None)


def test_media_type(shared: LiveServer) -> None:
    response = shared.http.post(CHAT, content=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
    check(response, 415, None)


def test_errors_of_a_stream_are_plain_json(shared: LiveServer) -> None:
    check(shared.chat(stream=True, temperature=9), 400, "temperature")
    check(shared.complete([5] * 5000, stream=True), 400, "prompt", "context_length_exceeded")


def test_a_full_queue_is_429_with_retry_after() -> None:
    with live(FakeEngine(max_queued=0)) as server:
        for stream in (False, True):
            response = server.chat(stream=stream)
            check(response, 429, None, "slow_down")
            assert 0 < int(response.headers["retry-after"]) <= 120
        assert server.metrics()['lockstep_requests_rejected_total{model_name="lockstep-tiny",reason="queue_full"}'] == 2


def test_a_batch_that_does_not_fit_leaves_nothing_behind() -> None:
    engine = FakeEngine(max_queued=3, max_running=0)
    with live(engine) as server:
        check(server.complete(["a"] * 5), 429, None)
        wait_until(lambda: server.service.link.open_requests() == 0)
        assert len(engine.cancels) == 3


def test_draining_is_503_with_retry_after(server: LiveServer) -> None:
    server.call(server.service.drain)
    response = server.chat()
    check(response, 503, None, "server_is_overloaded")
    assert int(response.headers["retry-after"]) > 0
    assert server.http.get("/ready").status_code == 503
    assert server.http.get("/live").status_code == 200
    assert server.http.get("/health").status_code == 200
    assert server.metrics()['lockstep_draining{model_name="lockstep-tiny"}'] == 1


def test_an_engine_failure_before_the_end_is_500() -> None:
    with live(FakeEngine(fail_after=2)) as server:
        check(server.complete("a b c d e f"), 500, None, "engine_error")
        assert server.metrics()['lockstep_requests_total{finish_reason="error",model_name="lockstep-tiny"}'] == 1


def test_an_engine_failure_in_a_stream_is_an_error_frame() -> None:
    with live(FakeEngine(fail_after=2, bursts=(1,))) as server:
        response = server.complete("a b c d e f", stream=True)
        assert response.status_code == 200
        frames = response.text.removesuffix("\n\n").split("\n\n")
        assert frames[-1] == "data: [DONE]"
        error = json.loads(frames[-2].removeprefix("data: "))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not INSIDE.search(response.text)
        assert '"finish_reason":"stop"' not in response.text
        assert server.http.get("/live").status_code == 200


def test_a_dead_engine_ends_everything_and_is_not_live() -> None:
    engine = FakeEngine()
    with live(engine) as server:
        engine.crash = True
        check(server.chat(), 503, None)
        assert server.http.get("/live").status_code == 503
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 503
        check(server.chat(), 503, None)
        check(server.http.get("/v1/models"), 503, None)
        assert server.metrics()['lockstep_engine_up{model_name="lockstep-tiny"}'] == 0


def test_a_bug_says_nothing_of_the_inside(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("at /secret/file.py 0x7fff1234")

    monkeypatch.setattr("server.routes.generate.check_model", broken)
    check(server.chat(), 500, None, "internal_error")
    assert server.metrics()['lockstep_http_requests_in_progress{model_name="lockstep-tiny"}'] == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("x", param="p", code="c"), 400),
        (CapacityError("x", retry_after=500), 429),
        (UnavailableError("x"), 503),
        (StateError("x"), 500),
        (ConfigError("x"), 500),
        (ZeroDivisionError("x"), 500),
        (ApiError(413, "x"), 413),
    ],
)
def test_every_exception_has_one_status(error: Exception, status: int) -> None:
    known = from_exception(error)
    assert known.status == status
    assert int(known.headers.get("Retry-After", "1")) <= 120


def test_field_paths() -> None:
    assert field_path(("messages", 0, "content")) == "messages[0].content"
    assert field_path(()) is None


def test_a_wrong_message_among_thousands_is_found_off_the_loop(shared: LiveServer) -> None:
    check(shared.http.post(CHAT, json={"messages": [{"role": "x"}] * 5000}), 400, "messages[0].role")
