"""`lockstep serve` as a user starts it, and what tests want to know of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.command import children

ROOT = Path(__file__).parents[2]


class Served:
    """A running server. `log` holds its output lines; `metrics()` its samples by `name{labels}`."""

    def __init__(self, *arguments: str, command: tuple[str, ...] = ("server", "serve")) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", "0", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.log: list[str] = []
        for line in self.process.stdout:
            self.log.append(line.rstrip("\n"))
            if found := re.search(r"ready in .* on (http://\S+)", line):
                self.url = found.group(1)
                break
        else:
            raise AssertionError("\n".join(self.log))

    def metrics(self) -> dict[str, float]:
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        rows = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def total(self, name: str) -> float:
        """The sum over all label values of one metric."""
        return sum(value for key, value in self.metrics().items() if key.split("{")[0] == name)

    def status(self, path: str) -> int:
        return httpx.get(f"{self.url}{path}", timeout=30).status_code

    @property
    def engine(self) -> int:
        """The engine's process id."""
        (pid,) = children(self.process.pid)
        return pid

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served("--threads", "1", "--max-num-seqs", "16", "--audit-interval", "5", "--log-level", "warning")
    try:
        yield server
    finally:
        assert server.stop() == 0
