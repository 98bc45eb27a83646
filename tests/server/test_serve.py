"""The command: its lines, its exit codes, its signals."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from server.__main__ import COMMANDS, main
from tests.server.command import MODEL, ROOT, Command, children, metrics_page, start, stream
from tests.server.live import COMPLETIONS, PATIENCE, parse_sse, wait_until


def test_one_start_line_then_service_then_a_clean_end(commands: list[Command]) -> None:
    command = start(commands, "ok", "--max-num-seqs", "3").ready()
    assert command.lines[0].startswith("lockstep: loading ")
    assert "lockstep: load 50%" in command.lines
    line = command.lines[-1]
    for choice in ("model=lockstep-tiny", "speculative=mtp:3", "max_model_len=2048", "fake=yes", "load_s="):
        assert choice in line
    body = httpx.post(
        command.url + COMPLETIONS, json={"prompt": "secret words", "max_tokens": 5}, timeout=PATIENCE
    ).json()
    assert body["usage"]["completion_tokens"] == 5
    for path in ("/live", "/ready", "/health"):
        assert httpx.get(command.url + path, timeout=PATIENCE).status_code == 200
    command.signal()
    code, errors = command.end()
    assert code == 0
    assert "secret words" not in errors
    assert "completion_tokens=5" in errors


@pytest.mark.parametrize(("mode", "code", "words"), [("config", 2, "cannot work"), ("fatal", 1, "Out of memory")])
def test_an_engine_that_cannot_start(commands: list[Command], mode: str, code: int, words: str) -> None:
    returned, errors = start(commands, mode).end()
    assert returned == code
    assert words in errors
    assert errors.count("\n") == 1
    assert "Traceback" not in errors


def test_sigterm_while_loading(commands: list[Command]) -> None:
    command = start(commands, "loading")
    command.wait_for("lockstep: load 50%")
    command.signal()
    assert command.end()[0] == 0


def test_sigterm_lets_streams_finish_and_refuses_new_requests(commands: list[Command]) -> None:
    command = start(commands, "hold").ready()
    received: list[str] = []
    reader = stream(command.url, received)
    wait_until(lambda: len(received) > 0)
    with httpx.Client(base_url=command.url, timeout=PATIENCE) as client:
        client.get("/ready")
        late: list[str] = []
        release = stream(command.url, late, prompt=[7])  # accepted before the signal, so still running after it
        wait_until(lambda: "requests_running{" + MODEL + "} 2" in metrics_page(command))
        command.signal()
        wait_until(lambda: client.get("/ready").status_code == 503)
        refused = client.post(COMPLETIONS, json={"prompt": [9]})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        assert client.get("/ready").json() == {"status": "draining"}
        assert client.get("/live").status_code == 200
    assert command.process.poll() is None
    command.signal()  # the second signal: now
    reader.join(PATIENCE)
    release.join(PATIENCE)
    code, _ = command.end()
    assert code == 0
    assert "server_is_overloaded" in "".join(received)


def test_streams_finish_within_the_drain_timeout(commands: list[Command]) -> None:
    command = start(commands, "hold").ready()
    received: list[str] = []
    reader = stream(command.url, received)
    wait_until(lambda: len(received) > 0)
    body = b'{"prompt":[9],"max_tokens":1}'
    with socket.create_connection(("127.0.0.1", int(command.url.rpartition(":")[2]))) as late:
        # this request is inside before the signal, its body comes after it and lets the engine go on
        late.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        assert late.recv(1000).startswith(b"HTTP/1.1 100")
        command.signal()
        wait_until(lambda: httpx.get(command.url + "/ready", timeout=PATIENCE).status_code == 503)
        late.sendall(body)
        assert late.recv(10_000).startswith(b"HTTP/1.1 200")
    reader.join(PATIENCE)
    code, _ = command.end()
    assert code == 0
    chunks = parse_sse("".join(received))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_what_runs_is_cut_after_the_drain_timeout(commands: list[Command]) -> None:
    command = start(commands, "hold", "--drain-timeout", "0.2").ready()
    received: list[str] = []
    reader = stream(command.url, received)
    whole: list[httpx.Response] = []
    body = {"prompt": [5] * 40, "max_tokens": 30}
    poster = threading.Thread(
        target=lambda: whole.append(httpx.post(command.url + COMPLETIONS, json=body, timeout=PATIENCE))
    )
    wait_until(lambda: len(received) > 0)
    poster.start()
    wait_until(lambda: "requests_running{" + MODEL + "} 2" in metrics_page(command))
    command.signal(signal.SIGINT)
    reader.join(PATIENCE)
    poster.join(PATIENCE)
    assert command.end()[0] == 0
    assert "".join(received).endswith("data: [DONE]\n\n")
    assert "server_is_overloaded" in "".join(received)
    assert whole[0].status_code == 503
    assert whole[0].headers["retry-after"]
    assert whole[0].json()["error"]["code"] == "server_is_overloaded"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_the_first_process_of_a_container_ends_on_sigterm(commands: list[Command]) -> None:
    """A first process has no default action for signals: without its own it would only end by SIGKILL."""
    wrapper = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*wrapper, "true"], check=False, capture_output=True).returncode:
        pytest.skip("may not make namespaces")
    command = start(commands, "hold", "--drain-timeout", "0.2", wrapper=wrapper).ready()
    received: list[str] = []
    reader = stream(command.url, received)
    wait_until(lambda: len(received) > 0)
    (first,) = children(command.process.pid)
    os.kill(first, signal.SIGTERM)
    reader.join(PATIENCE)
    assert command.end()[0] == 0
    assert "server_is_overloaded" in "".join(received)


def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"lockstep serve: Port {port} on 127.0.0.1 is already in use.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/dir"], "does not exist"),
        (["--speculative", "mtp:x"], "--speculative"),
        (["--port", "99999"], "--port"),
        (["--host", "no.such.host.invalid"], "not known"),
    ],
)
def test_what_cannot_work_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main([]) == 2
    assert main(["nonsense"]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep ")


def test_the_http_process_never_imports_torch() -> None:
    code = (
        "import sys, server.serve, server.app, server.service, server.webserver\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
