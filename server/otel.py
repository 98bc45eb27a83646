"""Traces by OpenTelemetry: one span per generation request, by the GenAI semantic conventions, sent by OTLP over HTTP.

Where to, how often and under which name are the SDK's own environment variables (`OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME` ...). Needs the extra `otel`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.requests import Request

from runtime.api import RequestTiming
from server.job import Job
from server.meter import package_version
from server.tracing import Trace, Tracing

PROVIDER = "lockstep"
CLOSE_SECONDS = 3.0
_propagator = TraceContextTextMapPropagator()


class SpanTrace(Trace):
    """A request as a span. Events: `queued`, `prefill` (its prompt is computed from here on), `first_token`."""

    def __init__(self, span: api.Span, operation: str) -> None:
        self._span = span
        self._operation = operation
        self._queued_at = 0
        self._ended = False

    @property
    def trace_id(self) -> str | None:
        """As in the span."""
        return api.format_trace_id(self._span.get_span_context().trace_id) if self._span.is_recording() else None

    def describe(self, job: Job) -> None:
        """What was asked for, as it was resolved."""
        sampling = job.requests[0].sampling
        self._span.update_name(f"{self._operation} {job.model}")
        attributes: dict[str, AttributeValue] = {
            "gen_ai.request.model": job.model,
            "gen_ai.response.model": job.model,
            "gen_ai.response.id": job.id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.output.type": "text",
            "lockstep.request.stream": job.fields.stream,
        }
        if sampling.top_k:
            attributes["gen_ai.request.top_k"] = sampling.top_k
        if job.fields.seed is not None:
            attributes["gen_ai.request.seed"] = job.fields.seed
        if len(job.requests) > 1:
            attributes["gen_ai.request.choice.count"] = len(job.requests)
        self._span.set_attributes(attributes)

    def queue(self, submitted: int) -> None:
        """See `Trace`."""
        self._queued_at = submitted
        self._span.add_event("queued", timestamp=submitted)

    def first_token(self, timing: RequestTiming | None) -> None:
        """See `Trace`. When the prompt began to be computed, the engine says afterwards."""
        now = time.time_ns()
        if timing is not None:
            self._span.add_event("prefill", timestamp=min(self._queued_at + int(timing.queued * 1e9), now))
        self._span.add_event("first_token", timestamp=now)

    def use(self, *, prompt: int, cached: int, completion: int, drafted: int, accepted: int) -> None:
        """See `Trace`."""
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": prompt,
                "gen_ai.usage.cache_read.input_tokens": cached,
                "gen_ai.usage.output_tokens": completion,
                "lockstep.usage.drafted_tokens": drafted,
                "lockstep.usage.accepted_tokens": accepted,
            }
        )

    def finish(self, reasons: Sequence[str]) -> None:
        """See `Trace`."""
        self._span.set_attribute("gen_ai.response.finish_reasons", list(reasons))
        self._span.set_attribute("http.response.status_code", 200)

    def fail(self, kind: str, status: int | None) -> None:
        """See `Trace`. By the conventions of HTTP servers, a client's own fault is no error of the span."""
        self._span.set_attribute("error.type", kind)
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if status is None or status >= 500:
            self._span.set_status(api.StatusCode.ERROR)

    def end(self) -> None:
        """See `Trace`."""
        if not self._ended:
            self._ended = True
            self._span.end()


class OtelTracing(Tracing):
    """Owns the tracer provider; `processor` gets the ended spans."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._provider = TracerProvider(resource=resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("lockstep", package_version())

    def begin(self, request: Request, operation: str) -> Trace:
        """A span under the caller's (`traceparent`), or a new trace."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "http.request.method": request.method,
            "http.route": request.url.path,
            "lockstep.request.id": request.state.request_id,
        }
        if request.url.hostname is not None:
            attributes["server.address"] = request.url.hostname
        if request.url.port is not None:
            attributes["server.port"] = request.url.port
        parent = _propagator.extract(request.headers)
        span = self._tracer.start_span(operation, parent, kind=api.SpanKind.SERVER, attributes=attributes)
        return SpanTrace(span, operation)

    def close(self) -> None:
        """A collector that does not answer delays the end by `CLOSE_SECONDS` at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def resource() -> Resource:
    """Who we are, where the environment does not say."""
    known = Resource.create({SERVICE_VERSION: package_version()})
    if str(known.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        known = known.merge(Resource({SERVICE_NAME: PROVIDER}))
    return known


def otlp() -> OtelTracing:
    """Spans leave in batches, from a thread of their own."""
    return OtelTracing(BatchSpanProcessor(OTLPSpanExporter()))
