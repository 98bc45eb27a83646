"""One server, one Prometheus and one load for all live tests."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import Served
from tests.observability.load import Load
from tests.observability.stack import Observed, Prometheus, absent

SECONDS = 40.0
# Little room, so that requests wait for each kind of it and are preempted.
SERVER = (
    *("--threads", "1", "--audit-interval", "25", "--log-level", "warning"),
    *("--max-num-seqs", "8", "--max-queued-requests", "12"),
    *("--max-model-len", "768", "--num-blocks", "64", "--num-slots", "7"),
)


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    if reason := absent():
        pytest.skip(reason)
    server = Served(*SERVER)
    try:
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), server.url.removeprefix("http://"))
        try:
            prometheus.wait_for("lockstep_engine_up == 1")
            load = Load(server.url, SECONDS)
            start = time.time()
            load.run()
            page = httpx.get(f"{server.url}/metrics", timeout=30).text
            # the recording rules of the last scrape, too
            prometheus.wait_for("lockstep:slo_bad:ratio_rate3d")
            time.sleep(2)
            assert {"200", "400", "429", "left"} <= set(load.seen), load.seen
            yield Observed(prometheus, page, start, start + SECONDS)  # what comes later are the last answers
        finally:
            prometheus.stop()
    finally:
        assert server.stop() == 0
