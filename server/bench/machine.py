"""Where a result was measured: machine, versions, command line."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("lockstep", "torch", "numpy", "httpx")
KEY_FLAG = "--api-key"


def cpu_model() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def load_average() -> list[float] | None:
    """Of 1, 5 and 15 minutes."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return None


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """The machine now."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "system": platform.platform(),
        "load_average": load_average(),
    }


def versions() -> dict[str, str | None]:
    """What is installed here; a server elsewhere may differ."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def command_line(bench: str, arguments: Sequence[str]) -> list[str]:
    """What was typed, without secrets."""
    shown: list[str] = []
    hide = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide:
            shown.append("...")
        elif name == KEY_FLAG and equals:
            shown.append(f"{KEY_FLAG}=...")
        else:
            shown.append(argument)
        hide = not hide and argument == KEY_FLAG
    return ["lockstep", "bench", bench, *shown]


def now() -> str:
    """The time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Occasion:
    """When, where and by which command a result came to be."""

    def __init__(self, bench: str, arguments: Sequence[str]) -> None:
        self._bench = bench
        self._arguments = arguments
        self._at = now()
        self._machine = machine()
        self._start = time.monotonic()

    def header(self) -> dict[str, Any]:
        """For the JSON file, at the end."""
        return {
            "bench": self._bench,
            "command": command_line(self._bench, self._arguments),
            "started_at": self._at,
            "seconds": round(time.monotonic() - self._start, 2),
            "machine": self._machine | {"load_average_after": load_average()},
            "versions": versions(),
        }

    def line(self) -> str:
        """For the terminal, at the end."""
        load, after = self._machine["load_average"], load_average()
        return (
            f"{self._machine['cpu']}, {self._machine['usable_cores']} cores, load average {load[0] if load else '?'}"
            f" before and {after[0] if after else '?'} after, {time.monotonic() - self._start:.0f} s\n"
        )
