"""`lockstep serve` with a scripted engine, as a process, and streams from it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.server.live import COMPLETIONS, PATIENCE

ROOT = Path(__file__).parents[2]
MODEL = 'model_name="lockstep-tiny"'


class Command:
    """`lockstep serve` with a scripted engine, as a process."""

    def __init__(self, mode: str, *arguments: str, wrapper: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "tests.server.fake_serve", mode, "--port", "0", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.url = ""

    def ready(self) -> Command:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "ready in" in line:
                self.url = next(word for word in line.split() if word.startswith("http://"))
                return self
        raise AssertionError(self.end())

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        while text not in (line := self.process.stdout.readline()):
            assert line, "ended before it said so"

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


def start(commands: list[Command], mode: str, *arguments: str, wrapper: tuple[str, ...] = ()) -> Command:
    """A command that the fixture `commands` ends."""
    commands.append(Command(mode, *arguments, wrapper=wrapper))
    return commands[-1]


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return found


def metrics_page(command: Command) -> str:
    return httpx.get(command.url + "/metrics", timeout=PATIENCE).text


def metrics(command: Command) -> dict[str, float]:
    """The page as `name{labels}` -> value."""
    samples = (line.rpartition(" ") for line in metrics_page(command).splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in samples}


def probe(command: Command, path: str) -> int:
    return httpx.get(command.url + path, timeout=PATIENCE).status_code


def stream(url: str, into: list[str], **fields: Any) -> threading.Thread:
    def read() -> None:
        body = {"prompt": [5] * 40, "stream": True, "max_tokens": 30} | fields
        with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=PATIENCE) as response:
            for text in response.iter_text():
                into.append(text)

    thread = threading.Thread(target=read)
    thread.start()
    return thread
