"""One span per request: what is in it, under whose trace it lies, and that nothing is there when it is off."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from runtime.api import ConfigError
from server.otel import OtelTracing
from server.tracing import NoTracing, tracing_of
from tests.server.command import ROOT, Command
from tests.server.live import CHAT, COMPLETIONS, PATIENCE, LiveServer, live, wait_until
from tests.support.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Hello there"}]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NAMES = ["queued", "prefill", "first_token"]


class Traced:
    """A server whose spans are kept."""

    def __init__(self, server: LiveServer, exporter: InMemorySpanExporter) -> None:
        self.server = server
        self._exporter = exporter

    def span(self) -> ReadableSpan:
        """The one that ended since the last call."""
        wait_until(lambda: len(self._exporter.get_finished_spans()) > 0)
        (span,) = self._exporter.get_finished_spans()
        self._exporter.clear()
        assert span.kind is SpanKind.SERVER
        return span

    def none(self) -> bool:
        return not self._exporter.get_finished_spans()


def traced_server(engine: FakeEngine, **settings: Any) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    with live(engine, tracing, **settings) as server:
        yield Traced(server, exporter)
    tracing.close()


@pytest.fixture
def traced() -> Iterator[Traced]:
    yield from traced_server(FakeEngine())


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_chat_span_says(traced: Traced, stream: bool) -> None:
    answer = traced.server.http.post(
        CHAT,
        json={
            "messages": MESSAGES,
            "max_tokens": 7,
            "temperature": 0.5,
            "seed": 0,
            "top_k": 3,
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        },
        headers={"X-Request-Id": "mine"},
    )
    body = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: ")) if stream else answer.json()
    span = traced.span()
    said = attributes(span)
    assert span.name == "chat lockstep-tiny"
    assert (
        said
        | {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "lockstep",
            "gen_ai.request.model": "lockstep-tiny",
            "gen_ai.response.model": "lockstep-tiny",
            "gen_ai.response.id": body["id"],
            "gen_ai.request.max_tokens": 7,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_k": 3,
            "gen_ai.request.seed": 0,
            "gen_ai.output.type": "text",
            "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": body["usage"]["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": body["usage"]["prompt_tokens_details"]["cached_tokens"],
            "gen_ai.response.finish_reasons": ("length",),
            "http.route": CHAT,
            "http.request.method": "POST",
            "http.response.status_code": 200,
            "server.address": "127.0.0.1",
            "server.port": traced.server.port,
            "lockstep.request.id": "mine",
            "lockstep.request.stream": stream,
        }
        == said
    )
    assert said["lockstep.usage.drafted_tokens"] > said["lockstep.usage.accepted_tokens"] > 0
    assert {"gen_ai.request.choice.count", "error.type"}.isdisjoint(said)
    assert span.status.status_code is StatusCode.UNSET
    assert span.parent is None


def test_events_come_in_the_order_of_time(traced: Traced) -> None:
    traced.server.complete("a b c", max_tokens=5)
    span = traced.span()
    assert span.name == "text_completion lockstep-tiny"
    assert [event.name for event in span.events] == NAMES
    assert span.start_time is not None and span.end_time is not None
    moments = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert all(a <= b for a, b in pairwise(moments))
    queued, prefill, first_token = (event.timestamp for event in span.events)
    assert prefill == min(queued + 1_000_000, first_token)  # what the fake says that it waited


def test_a_stop_string_and_several_choices(traced: Traced) -> None:
    traced.server.complete("stop here and now", max_tokens=12, stop=[" here"], n=2)
    span = traced.span()
    assert attributes(span)["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert attributes(span)["gen_ai.request.choice.count"] == 2
    assert [event.name for event in span.events] == NAMES


def test_the_caller_s_trace_goes_on(traced: Traced) -> None:
    for flag, sampled in (("01", True), ("00", False)):
        header = {"traceparent": f"00-{TRACE}-{PARENT}-{flag}"}
        traced.server.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, headers=header)
        if not sampled:
            assert traced.none()
            continue
        span = traced.span()
        assert span.context is not None and span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
    for broken in ("", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "zz"):
        traced.server.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"traceparent": broken})
        assert traced.span().parent is None


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        ({"prompt": 0.5}, "invalid_request_error", 400),
        ({"prompt": [5] * 5000}, "context_length_exceeded", 400),
        ({"prompt": "a", "model": "other"}, "model_not_found", 404),
    ],
)
def test_a_refusal_is_no_error_of_the_server(traced: Traced, body: dict[str, Any], kind: str, status: int) -> None:
    assert traced.server.http.post(COMPLETIONS, json=body).status_code == status
    span = traced.span()
    assert attributes(span)["error.type"] == kind
    assert attributes(span)["http.response.status_code"] == status
    assert span.status.status_code is StatusCode.UNSET
    assert not span.events


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_after", [0, 3])
def test_a_failure_is_one(stream: bool, fail_after: int) -> None:
    for traced in traced_server(FakeEngine(fail_after=fail_after)):
        traced.server.http.post(COMPLETIONS, json={"prompt": "a b c d e f", "max_tokens": 9, "stream": stream})
        span = traced.span()
        assert attributes(span)["error.type"] == "engine_error"
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span).get("http.response.status_code") == (None if stream else 500)
        assert attributes(span)["gen_ai.usage.output_tokens"] == fail_after
        assert "gen_ai.response.finish_reasons" not in attributes(span)


def test_a_client_that_leaves(traced: Traced) -> None:
    traced.server.engine.freeze_after = 2
    body = {"prompt": "a b c d e f", "max_tokens": 50, "stream": True, "ignore_eos": True}
    with traced.server.http.stream("POST", COMPLETIONS, json=body) as response:
        next(response.iter_raw())
    span = traced.span()
    assert attributes(span)["error.type"] == "client_gone"
    assert span.status.status_code is StatusCode.UNSET


def test_a_full_queue_and_a_drain(traced: Traced) -> None:
    traced.server.call(traced.server.service.drain)
    assert traced.server.complete("a").status_code == 503
    span = traced.span()
    assert attributes(span)["http.response.status_code"] == 503
    assert span.status.status_code is StatusCode.ERROR


def test_nothing_a_client_wrote_is_in_a_span(traced: Traced) -> None:
    traced.server.chat("correct horse battery staple", max_tokens=4, user="somebody")
    said = traced.span().to_json()
    for word in ("horse", "staple", "somebody"):
        assert word not in said


def test_other_routes_have_no_span(traced: Traced) -> None:
    for path in ("/live", "/metrics", "/v1/models", "/nope"):
        traced.server.http.get(path)
    assert traced.none()


def test_the_log_line_names_the_trace(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "server.response"):
        traced.server.complete("a", max_tokens=1)
        span = traced.span()
    (line,) = (record for record in caplog.records if record.message == "generation")
    assert span.context is not None
    assert line.fields["trace"] == f"{span.context.trace_id:032x}"


# --- off, and on by the command


def test_off_imports_nothing() -> None:
    """The web framework may import OpenTelemetry's interface; neither the SDK, nor an exporter, nor our use of them."""
    code = """
import sys
import server.app, server.serve
names = ("opentelemetry.sdk", "opentelemetry.exporter", "server.otel")
sys.exit(any(name.startswith(names) for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    assert isinstance(tracing_of("off"), NoTracing)


def test_without_the_extra_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "server.otel", None)
    with pytest.raises(ConfigError, match="lockstep\\[otel\\]"):
        tracing_of("otlp")


def test_a_variable_that_cannot_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(ConfigError, match=r"OTEL_.*positive"):
        tracing_of("otlp")


class Collector(ThreadingHTTPServer):
    """Takes OTLP as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Take)
        self.taken: list[tuple[str, ExportTraceServiceRequest]] = []


class Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        message = ExportTraceServiceRequest()
        message.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        self.server.taken.append((self.path, message))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def command(port: int, *variables: str) -> Command:
    names = (f"OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:{port}", *variables)
    return Command("ok", "--tracing", "otlp", wrapper=("env", *names))


def ask(url: str) -> None:
    body = {"prompt": "a b", "max_tokens": 2}
    assert httpx.post(url + COMPLETIONS, json=body, timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize(("variables", "name"), [((), "lockstep"), (("OTEL_SERVICE_NAME=mine",), "mine")])
def test_spans_reach_a_collector_at_the_latest_when_the_server_ends(variables: tuple[str, ...], name: str) -> None:
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        served = command(collector.server_address[1], *variables).ready()
        ask(served.url)
        served.signal()
        assert served.end()[0] == 0
        collector.shutdown()
    (path, message) = collector.taken[0]
    assert path == "/v1/traces"
    (group,) = message.resource_spans
    assert {each.key: each.value.string_value for each in group.resource.attributes}["service.name"] == name
    (span,) = group.scope_spans[0].spans
    assert span.name == "text_completion lockstep-tiny"
    assert [event.name for event in span.events] == NAMES


def test_a_collector_that_never_answers_keeps_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        served = command(silent.getsockname()[1]).ready()
        ask(served.url)
        served.signal()
        code, errors = served.end()  # within the patience of every other test that ends a server
        assert code == 0
        assert "Traceback" not in errors
