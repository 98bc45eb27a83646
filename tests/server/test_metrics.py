from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from runtime.api import EngineStats
from server.meter import Meter
from server.metrics import FINISH_REASONS, PREFIX, REJECTIONS, TABLE, Row
from tests.server.live import CHAT, LiveServer, wait_until
from tests.support.fake_engine import FakeEngine

from tests.server.live import live  # isort: skip

MODEL = 'model_name="lockstep-tiny"'


def test_the_page_parses_and_every_child_exists_at_start() -> None:
    with live() as server:
        families = {family.name: family for family in text_string_to_metric_families(server.http.get("/metrics").text)}
    for row in TABLE:
        family = families[(PREFIX + row.name).removesuffix("_total")]
        assert family.type == row.kind
        assert family.documentation == row.help
        expected = max(1, len(row.combinations()))
        if row.kind == "histogram":
            assert len([s for s in family.samples if s.name.endswith("_count")]) == expected
        else:
            assert len(family.samples) == expected, row.name
        if row.told:
            assert set(family.samples[0].labels) == {"model_name", *row.labels}


def test_names_follow_the_conventions() -> None:
    names = [row.name for row in TABLE]
    assert len(set(names)) == len(names)
    for row in TABLE:
        assert row.name.endswith("_total") == (row.kind == "counter")
        assert (row.kind == "histogram") == bool(row.buckets)
        assert list(row.buckets) == sorted(set(row.buckets))
        assert row.help.endswith(".")


def test_buckets_reach_from_milliseconds_to_minutes() -> None:
    rows = {row.name: row for row in TABLE}
    ttft = rows["time_to_first_token_seconds"].buckets
    assert ttft[0] <= 0.005
    assert ttft[-1] >= 600


def test_counters_equal_usage(server: LiveServer) -> None:
    usages = [server.complete(f"word {index} " * 4, max_tokens=3 * index + 1).json()["usage"] for index in range(5)]
    chunks = server.stream(
        CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": "x", "stream_options": {"include_usage": True}}
    )
    usages.append(chunks[-1]["usage"])
    metrics = server.metrics()
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert metrics[f"lockstep_generation_tokens_total{{{MODEL}}}"] == generated
    assert metrics[f"lockstep_request_generation_tokens_sum{{{MODEL}}}"] == generated
    assert metrics[f"lockstep_prompt_tokens_total{{{MODEL}}}"] == sum(usage["prompt_tokens"] for usage in usages)
    assert metrics[f'lockstep_requests_total{{finish_reason="length",{MODEL}}}'] >= 3
    assert (
        sum(metrics[f'lockstep_requests_total{{finish_reason="{reason}",{MODEL}}}'] for reason in FINISH_REASONS) == 6
    )
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_max_tokens"):
        assert metrics[f"lockstep_{name}_count{{{MODEL}}}"] == 6
        assert metrics[f'lockstep_{name}_bucket{{le="+Inf",{MODEL}}}'] == 6
    wait_until(lambda: server.service.link.open_requests() == 0)
    assert server.metrics()[f"lockstep_request_queue_seconds_count{{{MODEL}}}"] >= 5


def test_tokens_between_emissions_are_counted_once_each(server: LiveServer) -> None:
    usage = server.complete("a b c d e f g h i j k", max_tokens=11).json()["usage"]
    metrics = server.metrics()
    later = metrics[f"lockstep_inter_token_latency_seconds_count{{{MODEL}}}"]
    assert later < usage["completion_tokens"]
    assert metrics[f"lockstep_emission_gap_seconds_count{{{MODEL}}}"] <= later
    paces = metrics[f"lockstep_request_time_per_output_token_seconds_count{{{MODEL}}}"]
    assert paces == (1 if later else 0)


def test_engine_counters_come_from_its_reports(server: LiveServer) -> None:
    server.complete("a b c d", max_tokens=8)
    wait_until(lambda: server.metrics()[f"lockstep_engine_tokens_emitted_total{{{MODEL}}}"] > 0)
    metrics = server.metrics()
    assert metrics[f'lockstep_spec_draft_tokens_total{{method="mtp",{MODEL}}}'] > 0
    assert metrics[f'lockstep_kv_blocks{{{MODEL},state="free"}}'] == 64
    assert metrics[f"lockstep_state_commit_missing_total{{{MODEL}}}"] == 0
    assert metrics[f'lockstep_scheduler_steps_total{{kind="verify",{MODEL}}}'] > 0
    assert metrics[f"lockstep_engine_up{{{MODEL}}}"] == 1


def test_http_metrics(server: LiveServer) -> None:
    server.chat()
    server.chat(temperature=9)
    for path in ("/nope", "/v1/models/x", "/a/b"):
        server.http.get(path)
    server.http.head("/live")
    metrics = server.metrics()

    def count(route: str, method: str, code: str) -> float:
        return metrics[f'lockstep_http_requests_total{{code="{code}",method="{method}",{MODEL},route="{route}"}}']

    assert count(CHAT, "POST", "200") == 1
    assert count(CHAT, "POST", "400") == 1
    assert count("/v1/models/{id}", "GET", "404") == 1
    assert metrics[f'lockstep_http_request_duration_seconds_count{{{MODEL},route="other"}}'] == 2
    assert metrics[f"lockstep_http_requests_in_progress{{{MODEL}}}"] == 1
    assert metrics[f'lockstep_requests_rejected_total{{{MODEL},reason="invalid"}}'] == 1


def test_series_do_not_depend_on_requests(server: LiveServer) -> None:
    before = set(server.metrics())
    assert len(before) <= 900
    for index in range(30):
        server.chat(model=f"model-{index}", user=f"user-{index}")
        server.chat(f"content {index}", n=1 + index % 2)
        server.http.request(["GET", "PUT", "PATCH", "FOO"][index % 4], f"/path/{index}")
        server.http.head(f"/v1/models/{index}")
    assert set(server.metrics()) == before


def test_counters_never_fall(server: LiveServer) -> None:
    last: dict[str, float] = {}
    for index in range(10):
        server.complete("a b", max_tokens=index + 1)
        now = {name: value for name, value in server.metrics().items() if "_total" in name or "_count" in name}
        assert all(now[name] >= value for name, value in last.items())
        last = now


def test_rejections_have_fixed_reasons(server: LiveServer) -> None:
    server.complete([5] * 5000)
    metrics = server.metrics()
    assert metrics[f'lockstep_requests_rejected_total{{{MODEL},reason="too_long"}}'] == 1
    assert {f'lockstep_requests_rejected_total{{{MODEL},reason="{reason}"}}' for reason in REJECTIONS} <= set(metrics)


def test_a_snapshot_without_data_is_zeros() -> None:
    page = Meter("m", "none", EngineStats).text().decode()
    for row in TABLE:
        if row.source is not None:
            part = "_count" if row.kind == "histogram" else ""
            assert f"{PREFIX}{row.name}{part}{{" in page


def test_rows_without_labels_have_one_child() -> None:
    assert Row("x_total", "counter", "X.").combinations() == ((),)


def test_registries_do_not_grow(server: LiveServer) -> None:
    assert isinstance(server.engine, FakeEngine)
    for index in range(50):
        server.complete("a", max_tokens=1 + index % 3)
    assert server.service.link.open_requests() == 0
    assert len(server.service.admission) == 0
