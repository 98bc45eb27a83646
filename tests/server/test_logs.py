"""Log lines: one per event, whose request it was, and nothing that a client wrote unless it was asked for."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.worker import JsonLines
from server.logs import FORMATTERS, JsonFormatter, LineFormatter, event, request_id
from tests.server.command import Command
from tests.server.live import CHAT, COMPLETIONS, PATIENCE, LiveServer, live, wait_until
from tests.support.fake_engine import FakeEngine

SECRET = "correct horse battery staple"


def record(message: str, *, error: BaseException | None = None, **fields: object) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("server.x", logging.WARNING, "x.py", 1, message, (), info)
    made.created = 1767225600.25
    if fields:
        made.fields = fields
    return made


def broken() -> ValueError:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        return error


def test_a_line_for_people() -> None:
    line = LineFormatter().format(record("it\nhappened", count=3, share=0.123456, words="a b", none=None))
    assert line == '2026-01-01T00:00:00.250Z warning server.x it\\nhappened count=3 share=0.1235 words="a b"'


def test_an_object_for_machines() -> None:
    text = JsonFormatter().format(record("it\nhappened", count=3, share=0.123456, words=["a b"], none=None))
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2026-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "server.x",
        "message": "it\nhappened",
        "count": 3,
        "share": 0.123456,
        "words": ["a b"],
    }


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter(), JsonLines()])
def test_a_traceback_stays_on_its_line(formatter: logging.Formatter) -> None:
    text = formatter.format(record("it failed", error=broken()))
    assert "\n" not in text
    assert "ValueError: two" in text
    if not isinstance(formatter, LineFormatter):
        assert json.loads(text)["traceback"].startswith("Traceback")


def test_the_engine_process_writes_the_same_keys() -> None:
    mine, theirs = (json.loads(formatter.format(record("x"))) for formatter in (JsonLines(), JsonFormatter()))
    assert mine == theirs


@pytest.mark.parametrize("form", FORMATTERS)
def test_a_line_says_whose_request_it_is(form: Any) -> None:
    token = request_id.set("abc")
    try:
        line = FORMATTERS[form]().format(record("x"))
        named = FORMATTERS[form]().format(record("x", id="other"))
    finally:
        request_id.reset(token)
    assert ("id=abc" in line) if form == "text" else json.loads(line)["id"] == "abc"
    assert "other" in named
    assert "abc" not in FORMATTERS[form]().format(record("x"))


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """What is logged, as JSON objects, while a test runs."""
    made: list[dict[str, Any]] = []

    class Keep(logging.StreamHandler[io.StringIO]):
        def emit(self, record: logging.LogRecord) -> None:
            made.append(json.loads(self.format(record)))

    handler = Keep(io.StringIO())
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield made
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def of(lines: list[dict[str, Any]], message: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["message"] == message]


def test_every_line_of_a_request_has_its_id(lines: list[dict[str, Any]]) -> None:
    engine = FakeEngine(fail_after=3)
    with live(engine) as server:
        ids = [f"mine-{i}" for i in range(12)]
        clients = [
            threading.Thread(
                target=server.http.post,
                args=(COMPLETIONS,),
                kwargs={"json": {"prompt": SECRET, "max_tokens": 2 + i}, "headers": {"X-Request-Id": name}},
            )
            for i, name in enumerate(ids)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        answer = server.http.post(COMPLETIONS, json={"prompt": 3.5})
        wait_until(lambda: len(of(lines, "request")) == 13)
    assert {line["id"] for line in of(lines, "request")} == {*ids, answer.headers["x-request-id"]}
    assert sorted(line["id"] for line in of(lines, "generation")) == sorted(ids)
    assert sorted(line["id"] for line in of(lines, "generation failed")) == sorted(ids[2:])
    for line in of(lines, "request"):
        assert line["method"] == "POST"
        assert line["route"] == COMPLETIONS
        assert line["seconds"] >= 0
    assert SECRET not in json.dumps(lines)
    assert "scripted failure" in json.dumps(of(lines, "generation failed"))


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ü", 'a"b'])
def test_an_id_that_cannot_be_an_id_is_replaced(shared: LiveServer, given: str) -> None:
    headers = {"X-Request-Id": given.encode("latin-1")}
    answered = shared.http.get("/live", headers=headers).headers["x-request-id"]
    assert answered.startswith("req-")
    assert shared.http.get("/live", headers={"X-Request-Id": "a.B_c-1"}).headers["x-request-id"] == "a.B_c-1"


def test_prompts_are_logged_when_asked_for(lines: list[dict[str, Any]]) -> None:
    with live(log_prompts="on") as server:
        server.complete(SECRET, max_tokens=1)
        server.http.post(
            CHAT,
            json={"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1},
            headers={"X-Request-Id": "chat-1"},
        )
        wait_until(lambda: len(of(lines, "request")) == 2)
    first, second = of(lines, "prompt")
    assert first["prompts"] == [SECRET]
    assert SECRET in second["prompts"][0]
    assert second["prompts"][0] != SECRET  # as the model sees it, template and all
    assert second["id"] == "chat-1"
    assert first["answer"] == of(lines, "generation")[0]["answer"]


@pytest.fixture
def command() -> Iterator[list[Command]]:
    made: list[Command] = []
    yield made
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()


def test_with_json_every_line_of_both_streams_is_an_object(command: list[Command]) -> None:
    command.append(Command("ok", "--log-format", "json", "--log-level", "debug", "--api-key", "hunter2"))
    said: list[dict[str, Any]] = []
    assert command[0].process.stdout is not None
    while not said or said[-1]["message"] != "ready":
        said.append(json.loads(command[0].process.stdout.readline()))
    ready = said[-1]
    assert ready["speculative"] == "mtp:3"
    assert [line["message"] for line in said[:2]] == ["starting", "loading"]
    headers = {"Authorization": "Bearer hunter2", "X-Request-Id": "one"}
    body = {"prompt": SECRET, "max_tokens": 2}
    assert httpx.post(ready["address"] + COMPLETIONS, json=body, headers=headers, timeout=PATIENCE).status_code == 200
    assert httpx.get(ready["address"] + "/live", timeout=PATIENCE).status_code == 200
    command[0].signal()
    out, errors = command[0].process.communicate(timeout=PATIENCE)
    assert command[0].process.returncode == 0
    logged = [json.loads(line) for line in errors.splitlines()]
    for line in [*said, *map(json.loads, out.splitlines()), *logged]:
        assert {"time", "level", "logger", "message"} <= set(line)
    (generation,) = of(logged, "generation")
    assert (generation["id"], generation["completion_tokens"]) == ("one", 2)
    assert {"POST", "GET"} == {line["method"] for line in of(logged, "request")}
    assert SECRET not in errors
    assert "hunter2" not in errors


def test_event_costs_nothing_below_the_level() -> None:
    class Untouchable:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    logger = logging.getLogger("server.quiet")
    logger.setLevel(logging.WARNING)
    event(logger, logging.INFO, "x", value=Untouchable())
