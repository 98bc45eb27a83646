"""What the manifests run besides the server, really run: health check, the chart's test, the fetching of weights."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server import fetch
from server.settings import Settings, embedded_model_dir
from tests.deploy.facts import image
from tests.deploy.objects import CHART, DEPLOY, load, pods
from tests.server.live import LiveServer
from tests.support.fake_engine import FakeEngine


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python program with a small environment."""
    whole = {"PATH": os.environ["PATH"], **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=whole, capture_output=True, text=True, check=False, timeout=120)


def test_the_health_check_follows_readiness() -> None:
    check = list(image().health[1:])
    with LiveServer(FakeEngine()) as server:
        assert run(check, LOCKSTEP_PORT=str(server.port)).returncode == 0
        server.call(server.service.drain)
        assert run(check, LOCKSTEP_PORT=str(server.port)).returncode != 0


@pytest.mark.parametrize(
    ("served", "given", "code"), [((), "", 0), (("a", "b"), "b,a", 0), (("a",), "", 1), (("a",), "x", 1)]
)
def test_the_chart_s_test_is_a_client(served: tuple[str, ...], given: str, code: int) -> None:
    with LiveServer(FakeEngine(), api_key=served) as server:
        done = run([str(CHART / "files" / "completion.py")], URL=server.url, KEYS=given)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(f"{server.settings.model_name}: ") == (code == 0)


@pytest.fixture
def web() -> Iterator[str]:
    """The embedded model's files on a web server, as the example's sums say."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(embedded_model_dir()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.mark.parametrize(
    "path", ["kustomize/components/weights-download/deployment.yaml", "kustomize/weights-fill/job.yaml"]
)
def test_weights_come_as_the_manifest_says(path: str, web: str, tmp_path: Path) -> None:
    """The container's own arguments, with this test's address and folders in the place of the pod's."""
    (pod,) = pods(load(DEPLOY / path))
    container = next(each for each in pod.containers if each["name"] == "fetch")
    (sums,) = load(DEPLOY / "kustomize" / "sums" / "sums.yaml")
    for name, text in sums["data"].items():
        (tmp_path / name).write_text(text)
    command, url, *rest = container["args"]
    assert command == "fetch"
    assert url.startswith("https://")
    mounts = {"/models/weights": str(tmp_path / "weights"), "/etc/lockstep/weights": str(tmp_path)}
    arguments = [functools.reduce(lambda text, mount: text.replace(*mount), mounts.items(), each) for each in rest]
    assert fetch.main([web, *arguments]) == 0
    settings = Settings(model_dir=str(tmp_path / "weights")).resolved()
    assert settings.speculative == Settings().resolved().speculative
