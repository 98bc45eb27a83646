"""`lockstep serve` as processes of ours: started on free loopback ports, waited for, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import httpx

import server
from server.bench.client import BenchError

END_SECONDS = 20.0
POLL_SECONDS = 0.05
READY = "ready in"

Command = Callable[[Sequence[str]], list[str]]  # serve's arguments -> a whole command line


def serve_command(arguments: Sequence[str]) -> list[str]:
    """`lockstep serve` of this very installation. `-P` keeps the current directory out of its import path."""
    return [sys.executable, "-P", "-m", "server", "serve", *arguments]


def environment() -> dict[str, str]:
    """Ours, without settings of a server, and importing the same packages wherever the command was typed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    root = str(Path(server.__path__[0]).parent)
    earlier = kept.get("PYTHONPATH")
    kept["PYTHONPATH"] = root + os.pathsep + earlier if earlier else root
    return kept


class ServerProcess:
    """One server. It has a session of its own, so that Ctrl-C reaches this command alone, which then ends it."""

    def __init__(self, label: str, arguments: Sequence[str], command: Command, output: IO[str]) -> None:
        self.label = label
        self.url = ""
        self.start_line = ""
        self._output = output
        self._process = subprocess.Popen(  # noqa: S603 - our own command line
            command(["--host", "127.0.0.1", "--port", "0", "--log-level", "warning", *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the server process."""
        return self._process.pid

    def wait_ready(self, seconds: float, say: Callable[[str], None]) -> None:
        """Until /ready says so; raises BenchError with the server's own last words."""
        deadline = time.monotonic() + seconds
        while not self._is_ready():
            if self._process.poll() is not None:
                said = self.said()
                raise BenchError(f"the server {self.label} ended at start: {said[-1] if said else 'without a word'}")
            if time.monotonic() > deadline:
                raise BenchError(f"the server {self.label} was not ready within {seconds:g} s.")
            say(f"starting {self.label}: {(self.said() or ['...'])[-1]}")
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        if not self.url:
            line = next((line for line in self.said() if READY in line), "")
            self.start_line = line
            self.url = next((word for word in line.split() if word.startswith("http://")), "")
        if not self.url:
            return False
        try:
            return httpx.get(self.url + "/ready", timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def said(self) -> list[str]:
        """All complete lines of its output so far."""
        text = Path(self._output.name).read_text(encoding="utf-8", errors="replace")
        return [line for line in text.rpartition("\n")[0].split("\n") if line.strip()]

    def ask_to_end(self) -> None:
        """SIGTERM."""
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Waits until it has ended; kills it when that takes too long."""
        self.ask_to_end()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def started(
    servers: Sequence[tuple[str, Sequence[str]]],
    *,
    seconds: float,
    say: Callable[[str], None],
    command: Command = serve_command,
) -> Iterator[list[ServerProcess]]:
    """Servers of these labels and arguments, all ready; they end with the block, also by an exception."""
    running: list[ServerProcess] = []
    with contextlib.ExitStack() as stack:
        try:
            for label, arguments in servers:
                output = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="lockstep-bench-", suffix=".log"))
                running.append(ServerProcess(label, arguments, command, output))
            for process in running:
                process.wait_ready(seconds, say)
            yield running
        finally:
            for process in running:
                process.ask_to_end()
            for process in running:
                process.end()
