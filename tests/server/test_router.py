"""What a gateway's endpoint picker reads: the contract of /metrics/router, against a scripted engine."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from runtime.api import EngineStats
from server.router import DIALECTS, Load, RouterPage, cache_shape, load_of
from tests.server.live import LiveServer, live, wait_until
from tests.support.fake_engine import FakeEngine

PATH = "/metrics/router"
NAMES = {
    "vllm": (
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    ),
    "sglang": ("sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage", "sglang:cache_config_info"),
}
SHAPE = {"vllm": ("block_size", "num_gpu_blocks"), "sglang": ("page_size", "num_pages")}


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def read(server: LiveServer, engine: str = "vllm") -> tuple[float, float, float]:
    """Waiting, running, usage."""
    page = families(server.http.get(PATH, params={"engine": engine}).text)
    waiting, running, usage = (page[name].samples[0].value for name in NAMES[engine][:3])
    return waiting, running, usage


@pytest.mark.parametrize("engine", DIALECTS)
def test_four_gauges_of_one_series_each(shared: LiveServer, engine: str) -> None:
    response = shared.http.get(PATH, params={"engine": engine})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    page = families(response.text)
    assert tuple(page) == NAMES[engine]
    for family in page.values():
        assert family.type == "gauge"
        (sample,) = family.samples
        assert sample.name == family.name
        assert sample.labels["model_name"] == "lockstep-tiny"
    for count in NAMES[engine][:2]:
        assert float(page[count].samples[0].value).is_integer()
    assert 0 <= page[NAMES[engine][2]].samples[0].value <= 1
    cache = page[NAMES[engine][3]].samples[0]
    assert cache.value == 1
    assert [cache.labels[label] for label in SHAPE[engine]] == ["16", "64"]


def test_without_a_word_the_names_are_vllms(shared: LiveServer) -> None:
    assert shared.http.get(PATH).text == shared.http.get(PATH, params={"engine": "vllm"}).text
    response = shared.http.get(PATH, params={"engine": "trt"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "engine"
    assert "sglang" in response.json()["error"]["message"]
    assert shared.http.head(PATH).status_code == 200
    assert shared.http.post(PATH).status_code == 405


def test_it_needs_no_key_like_the_other_page() -> None:
    with live(api_key=("secret",)) as server:
        assert server.http.get(PATH).status_code == server.http.get("/metrics").status_code == 200
        assert server.http.get("/v1/models").status_code == 401


def test_waiting_are_those_that_do_not_run() -> None:
    engine = FakeEngine(max_running=2)
    with live(engine) as server:
        assert read(server) == (0, 0, 0)
        engine.hold()
        clients = [threading.Thread(target=server.complete, args=("a b c",)) for _ in range(7)]
        for client in clients:
            client.start()
        wait_until(lambda: read(server)[:2] == (5, 2))
        assert read(server)[2] == pytest.approx(2 / 16)  # state slots are scarcer than blocks here
        assert read(server, "sglang") == read(server)
        engine.release()
        for client in clients:
            client.join()
        wait_until(lambda: read(server) == (0, 0, 0))


def test_who_takes_no_requests_looks_full(server: LiveServer) -> None:
    assert read(server)[2] == 0
    server.call(server.service.drain)
    assert server.http.get("/ready").status_code == 503
    assert read(server) == (0, 0, 1)


@pytest.mark.parametrize(
    ("blocks", "slots", "ready", "usage"),
    [
        ((0, 0), (0, 0), True, 0.0),
        ((1, 4), (0, 8), True, 0.25),
        ((1, 4), (8, 8), True, 1.0),
        ((0, 4), (1, 8), True, 0.125),
        ((0, 4), (0, 8), False, 1.0),
    ],
)
def test_usage_is_of_what_runs_out_first(
    blocks: tuple[int, int], slots: tuple[int, int], ready: bool, usage: float
) -> None:
    assert load_of(waiting=1, running=0, blocks=blocks, slots=slots, ready=ready) == Load(1, 0, usage)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (16, 100)),
        ({"prefix_cache": "off", "checkpoint_interval": "64", "state_checkpoints": "3"}, (16, 100)),
        ({"prefix_cache": "on", "checkpoint_interval": "64", "state_checkpoints": "3"}, (64, 3)),
        ({"prefix_cache": "on", "checkpoint_interval": "64", "state_checkpoints": "1000"}, (64, 25)),
        ({"prefix_cache": "on", "checkpoint_interval": "1", "state_checkpoints": "0"}, (1, 0)),
    ],
)
def test_a_block_reaches_to_the_next_checkpoint(changes: dict[str, str], shape: tuple[int, int]) -> None:
    assert cache_shape({"block_size": "16", "kv_blocks": "100"} | changes) == shape


def test_the_page_is_made_only_when_something_changed() -> None:
    loads = [Load(1, 2, 0.5), Load(1, 2, 0.5), Load(2, 2, 0.5)]
    page = RouterPage('a"b\\c\nd', lambda: loads.pop(0))
    first, again, other = (page.text("vllm") for _ in range(3))
    assert first is again
    assert first != other
    (waiting, *_) = families(other.decode())["vllm:num_requests_waiting"].samples
    assert (waiting.labels, waiting.value) == ({"model_name": 'a"b\\c\nd'}, 2)


def test_a_first_page_exists_before_the_engine_does() -> None:
    stats = EngineStats()
    page = RouterPage("m", lambda: load_of(waiting=0, running=stats.running, blocks=(0, 0), slots=(0, 0), ready=False))
    assert families(page.text("vllm").decode())["vllm:kv_cache_usage_perc"].samples[0].value == 1
