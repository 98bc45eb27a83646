"""One server, one Prometheus and one load for all live tests."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import Served
from tests.observability.load import WANTED, Load
from tests.observability.stack import Observed, Prometheus, absent

LEAST, MOST = 40.0, 240.0  # seconds of load
# Little room, so that requests wait for each kind of it and are preempted.
SERVER = (
    *("--threads", "1", "--audit-interval", "10", "--log-level", "warning"),
    *("--max-num-seqs", "8", "--max-queued-requests", "12"),
    *("--max-model-len", "640", "--num-blocks", "46", "--num-slots", "8"),
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
            start = time.time()
            load = Load(server.url, LEAST, MOST)
            end = load.run()
            page = httpx.get(f"{server.url}/metrics", timeout=30).text
            # the recording rules of the last scrape, too
            prometheus.wait_for("lockstep:slo_bad:ratio_rate3d")
            time.sleep(2)
            assert set(load.seen) >= WANTED, load.seen
            yield Observed(prometheus, page, start, end)
        finally:
            prometheus.stop()
    finally:
        server.process.send_signal(signal.SIGTERM)
        said, _ = server.process.communicate(timeout=60)
        assert (server.process.returncode, said) == (0, ""), "the server complained"
