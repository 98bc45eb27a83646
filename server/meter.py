"""The registry behind /metrics: makes every child of the table at start, and records what the HTTP process sees."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from runtime.api import Delta, Distribution, EngineStats, ModelInfo
from server.metrics import CHOICES, CODES, METHODS, PREFIX, START_PHASES, TABLE, Row

FAMILIES: dict[str, type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def base_labels(row: Row, model_name: str, method: str) -> dict[str, str]:
    """The labels every child of a row has in common."""
    labels = {"model_name": model_name}
    if row.name.startswith("spec_"):
        labels["method"] = method
    return labels


class EngineCollector(Collector):
    """Reads the rows with a source from the newest engine snapshot."""

    def __init__(self, read: Callable[[], EngineStats], model_name: str, method: str) -> None:
        self._read = read
        self._model_name = model_name
        self._method = method

    def collect(self) -> Iterator[Metric]:
        """One family per row."""
        stats = self._read()
        for row in TABLE:
            if row.source is None:
                continue
            common = base_labels(row, self._model_name, self._method)
            family = FAMILIES[row.kind](PREFIX + row.name, row.help, labels=[*common, *row.labels])
            for values, read in row.source(stats):
                labels = [*common.values(), *values]
                if isinstance(family, HistogramMetricFamily):
                    assert isinstance(read, Distribution)
                    family.add_metric(labels, cumulative(row.buckets, read.counts), read.total)
                else:
                    assert not isinstance(read, Distribution)
                    family.add_metric(labels, read)
            yield family


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts between bounds as the page has them: how many were at most each bound, at last all."""
    return list(zip([*map(floatToGoString, bounds), "+Inf"], itertools.accumulate(counts), strict=True))


def package_version() -> str:
    """The installed version; a checkout that was never installed has none."""
    try:
        return version("lockstep")
    except PackageNotFoundError:
        return "unknown"


class Meter:
    """Owns the registry and the children; the rest of the server says what happened."""

    def __init__(self, model_name: str, method: str, read_stats: Callable[[], EngineStats]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        self._counters: dict[str, dict[tuple[str, ...], Counter]] = {}
        self._gauges: dict[str, dict[tuple[str, ...], Gauge]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}
        self._told: list[tuple[Row, Gauge]] = []
        for row in TABLE:
            if row.source is None:
                self._create(row, base_labels(row, model_name, method))
        self.registry.register(EngineCollector(read_stats, model_name, method))
        ProcessCollector(registry=self.registry)
        self._model_name = model_name

    def _create(self, row: Row, common: Mapping[str, str]) -> None:
        name, names = PREFIX + row.name, [*common, *row.labels]
        combinations = row.combinations()
        if row.kind == "counter":
            counter = Counter(name, row.help, names, registry=self.registry)
            self._counters[row.name] = {c: counter.labels(*common.values(), *c) for c in combinations}
        elif row.kind == "gauge":
            gauge = Gauge(name, row.help, names, registry=self.registry)
            if row.told:
                self._told.append((row, gauge))
            self._gauges[row.name] = {c: gauge.labels(*common.values(), *c) for c in combinations}
        else:
            histogram = Histogram(name, row.help, names, buckets=row.buckets, registry=self.registry)
            self._histograms[row.name] = {c: histogram.labels(*common.values(), *c) for c in combinations}

    def _count(self, name: str, *labels: str, by: float = 1.0) -> None:
        self._counters[name][labels].inc(by)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        self._histograms[name][labels].observe(value)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)

    def engine_ready(self, info: ModelInfo, num_drafts: int, revision: str) -> None:
        """The engine came up, and says what it is.

        `num_drafts`: for a request that does not say. `revision`: of the source, where it is known.
        """
        for phase, seconds in info.startup_seconds.items():
            if phase in START_PHASES:
                self._gauges["startup_seconds"][(phase,)].set(seconds)
        self._gauges["spec_num_tokens"][()].set(num_drafts)
        ours = {"version": package_version(), "revision": revision, "python": platform.python_version()}
        said = info.choices | info.versions | ours
        for row, gauge in self._told:
            gauge.clear()
            gauge.labels(self._model_name, *(said.get(CHOICES.get(label, label), "") for label in row.labels)).set(1)

    def startup_total(self, seconds: float) -> None:
        """From process start to ready."""
        self._gauges["startup_seconds"][("total",)].set(seconds)

    def engine_up(self, up: bool) -> None:
        """Whether the engine makes progress."""
        self._gauges["engine_up"][()].set(up)

    def engine_restarted(self, reason: str) -> None:
        """A new engine process was started; `reason` is one of RESTART_REASONS."""
        self._count("engine_restarts_total", reason)

    def registries(self, *, inside: int, submitted: int) -> None:
        """HTTP requests being answered, and generations whose last delta has not come."""
        self._gauges["server_registry_entries"][("inside",)].set(inside)
        self._gauges["server_registry_entries"][("submitted",)].set(submitted)

    def draining(self) -> None:
        """The server is shutting down."""
        self._gauges["draining"][()].set(1)

    def http_started(self) -> float:
        """An HTTP request came in; returns its start time for `http_ended`."""
        self._gauges["http_requests_in_progress"][()].inc()
        return time.perf_counter()

    def http_ended(self, route: str, method: str, status: int, started: float) -> None:
        """An HTTP request was answered."""
        self._gauges["http_requests_in_progress"][()].dec()
        code = str(status) if str(status) in CODES else "other"
        key = (route, method if method in METHODS else "other", code)
        children = self._counters["http_requests_total"]
        if key not in children:  # HEAD, or a wrong method on a known route
            key = ("other", "other", code)
        children[key].inc()
        self._observe("http_request_duration_seconds", time.perf_counter() - started, route)

    def request_rejected(self, reason: str) -> None:
        """A generation was refused; `reason` is one of REJECTIONS."""
        self._count("requests_rejected_total", reason)

    def prompts_accepted(self, num_tokens: int) -> None:
        """The engine took an HTTP request's prompts, each counted once whatever n."""
        self._count("prompt_tokens_total", by=num_tokens)

    def request_accepted(self, prompt_len: int, max_tokens: int) -> None:
        """The engine took a generation."""
        self._observe("request_prompt_tokens", prompt_len)
        self._observe("request_max_tokens", max_tokens)

    def first_tokens(self, seconds: float, count: int) -> None:
        """A generation's first emission."""
        self._count("generation_tokens_total", by=count)
        self._observe("time_to_first_token_seconds", seconds)

    def more_tokens(self, gap: float, count: int) -> None:
        """A later emission, `gap` seconds after the one before."""
        self._count("generation_tokens_total", by=count)
        self._observe("emission_gap_seconds", gap)
        for _ in range(count):
            self._observe("inter_token_latency_seconds", gap / count)

    def request_finished(self, reason: str, num_tokens: int, seconds: float) -> None:
        """A generation ended; `reason` is one of FINISH_REASONS."""
        self._count("requests_total", reason)
        self._observe("request_generation_tokens", num_tokens)
        self._observe("e2e_request_latency_seconds", seconds)

    def request_pace(self, seconds_per_token: float) -> None:
        """How fast a generation went after its first emission."""
        self._observe("request_time_per_output_token_seconds", seconds_per_token)

    def timing(self, last: Delta) -> None:
        """What the engine says of a generation's time when it ends."""
        if last.timing is None:
            return
        self._observe("request_queue_seconds", last.timing.queued)
        self._observe("request_prefill_seconds", last.timing.prefill)
        self._observe("request_decode_seconds", last.timing.decode)
