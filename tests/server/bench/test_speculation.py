"""`lockstep bench speculation` with `lockstep serve` around scripted engines, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server.bench import servers
from server.bench.speculation import main
from tests.server.bench.fake_bench import serve
from tests.server.live import wait_until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The servers that were started."""
    found: list[int] = []

    class Watched(servers.ServerProcess):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            found.append(self.pid)

    monkeypatch.setattr(servers, "ServerProcess", Watched)
    monkeypatch.chdir(ROOT)
    return found


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_one_table(pids: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    load = ("--concurrency", "1,2", "--requests", "5", "--rounds", "2", "--warmup", "1", "--output-tokens", "8")
    settings = ("--speculative", "none", "--speculative", "mtp:3")
    before = signal.getsignal(signal.SIGTERM)
    assert main([*settings, *load, "--threads", "1", "--json", str(file)], command=serve("ok")) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    out = capsys.readouterr().out
    assert "answers compared with the first setting's: 20, different: 0" in out
    assert out.count("mtp:3") == 2
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["equality"] == {"compared": 20, "different": 0, "differences": []}
    assert found["workload"]["ask"]["temperature"] == 0
    assert [row["target"] for row in found["rows"]] == ["none", "mtp:3"] * 2
    assert all(row["summary"]["output_tokens"] == 10 * 8 for row in found["rows"])
    assert "speculative=none" in found["servers"]["none"]
    assert "speculative=mtp:3" in found["servers"]["mtp:3"]
    assert len(pids) == 2
    assert all(map(gone, pids))


@pytest.mark.parametrize(
    ("mode", "arguments", "words"),
    [
        ("config", (), "the server none ended at start: lockstep serve: This combination cannot work."),
        ("ok", ("--speculative", "mtp:x"), "the server mtp:x ended at start: lockstep serve: --speculative must be"),
        ("loading", ("--start-timeout", "1"), "the server none was not ready within 1 s."),
    ],
)
def test_servers_that_cannot_start(
    pids: list[int], capsys: pytest.CaptureFixture[str], mode: str, arguments: tuple[str, ...], words: str
) -> None:
    settings = () if "--speculative" in arguments else ("--speculative", "none")
    assert main([*settings, *arguments], command=serve(mode)) == 2
    assert words in capsys.readouterr().err
    assert len(pids) == 1
    assert all(map(gone, pids))


def test_sigterm_under_load_ends_the_servers_too() -> None:
    """It is handled as Ctrl-C is."""
    load = ("--speculative", "none", "--warmup", "0", "--requests", "1000000", "--concurrency", "1")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.server.bench.fake_bench", "ok", *load],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        found: list[int] = []
        wait_until(lambda: bool(found.extend(serving(process.pid)) or found), 60)
        wait_until(lambda: busy(found[0]), 60)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("lockstep bench speculation: interrupted\n")
    assert "Traceback" not in errors
    assert gone(found[0])


def serving(pid: int) -> list[int]:
    """The servers among the children of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {child: Path(f"/proc/{child}/cmdline") for child in children}
    return [
        int(child) for child, command in commands.items() if command.exists() and "fake_serve" in command.read_text()
    ]


def busy(pid: int) -> bool:
    """Whether a process has an open TCP connection."""
    with contextlib.suppress(FileNotFoundError):
        sockets = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
        lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        return any(line[3] == "01" and f"socket:[{line[9]}]" in sockets for line in lines)
    return False
