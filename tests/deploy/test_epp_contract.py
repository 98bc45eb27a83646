"""The contract of an endpoint picker, kept by real servers: what it scrapes, and whom its arithmetic picks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Served
from tests.server.live import PATIENCE, wait_until

WAITING, RUNNING, USAGE, CACHE = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)
SEATS = 2


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Served]]:
    start = partial(Served, "--threads", "1", "--max-num-seqs", str(SEATS), "--log-level", "warning")
    with ThreadPoolExecutor() as pool:
        servers = list(pool.map(lambda _: start(), range(2)))
    try:
        yield servers
    finally:
        for server in servers:
            server.process.kill()
            server.process.communicate()


def scrape(server: Served) -> dict[str, float]:
    """As the picker does it: classic text, gauges by name, and the first series of each."""
    response = httpx.get(f"{server.url}/metrics/router", timeout=PATIENCE)
    assert response.headers["content-type"].startswith("text/plain")
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.type == "gauge"
        assert len(family.samples) == 1
        values[family.name] = family.samples[0].value
    assert set(values) == {WAITING, RUNNING, USAGE, CACHE}
    assert values[WAITING] == int(values[WAITING])
    assert values[RUNNING] == int(values[RUNNING])
    assert 0 <= values[USAGE] <= 1
    return values


def scores(pages: list[dict[str, float]]) -> list[float]:
    """The default profile's queue scorer and KV utilisation scorer, each with weight 2, from their definitions."""
    waiting = [page[WAITING] for page in pages]
    most, least = max(waiting), min(waiting)
    queue = [1.0 if most == least else (most - each) / (most - least) for each in waiting]
    return [2 * by_queue + 2 * (1 - page[USAGE]) for by_queue, page in zip(queue, pages, strict=True)]


def generate(url: str, num_tokens: int, ended: list[int]) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
    ended.append(httpx.post(f"{url}/v1/completions", json=body, timeout=300).status_code)


def test_the_idle_replica_beats_the_busy_one(replicas: list[Served]) -> None:
    busy, idle = replicas
    assert scores([scrape(busy), scrape(idle)]) == [4.0, 4.0]
    ended: list[int] = []
    clients = [threading.Thread(target=generate, args=(busy.url, 100, ended)) for _ in range(SEATS + 3)]
    for client in clients:
        client.start()
    wait_until(lambda: scrape(busy)[RUNNING] == SEATS)
    seen = []
    while len(ended) < len(clients):  # whatever it is asked in between, it keeps to the contract
        seen.append(scrape(busy))
        with_idle = scores([seen[-1], scrape(idle)])
        if seen[-1][RUNNING]:
            assert with_idle[0] < with_idle[1]
        time.sleep(0.05)  # as often as a picker does
    assert max(page[WAITING] for page in seen) == 3
    assert all(page[RUNNING] <= SEATS for page in seen)
    for client in clients:
        client.join()
    assert ended == [200] * len(clients)
    wait_until(lambda: scrape(busy) == scrape(idle))


def test_usage_is_the_larger_of_the_two_on_the_other_page(replicas: list[Served]) -> None:
    """One request's usage only grows, so what is read in between lies in between."""
    busy = replicas[0]
    ended: list[int] = []
    client = threading.Thread(target=generate, args=(busy.url, 200, ended))
    client.start()
    wait_until(lambda: scrape(busy)[RUNNING] == 1)
    before, usage, after = larger_share(busy), scrape(busy)[USAGE], larger_share(busy)
    assert not ended
    assert before > 0
    assert before - 1e-4 <= usage <= after + 1e-4
    client.join()


def larger_share(server: Served) -> float:
    page = server.metrics()
    names = ("lockstep_kv_cache_usage_ratio", "lockstep_state_slot_usage_ratio")
    return max(page[f'{name}{{model_name="lockstep-tiny"}}'] for name in names)


def test_the_cache_is_described_by_what_the_engine_resolved(replicas: list[Served]) -> None:
    text = httpx.get(f"{replicas[0].url}/metrics/router", timeout=PATIENCE).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    labels = families[CACHE].samples[0].labels
    start = replicas[0].log[-1]
    words = dict(word.split("=", 1) for word in start.split() if "=" in word)
    if words.get("prefix_cache") == "on":
        assert labels["block_size"] == words["checkpoint_interval"]
        assert int(labels["num_gpu_blocks"]) <= int(words["state_checkpoints"])
    else:
        assert (labels["block_size"], labels["num_gpu_blocks"]) == (words["block_size"], words["kv_blocks"])
