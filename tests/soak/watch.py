"""What a run looks at from outside: the memory of both processes, the metrics page, and lines through points."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

KIB = 1024


def memory_of(pid: int) -> int:
    """Bytes of anonymous memory of a process, those swapped out included (swap hides a leak from the rest)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * KIB for name in ("RssAnon", "VmSwap"))


def cpu_of(pid: int) -> float:
    """Seconds of processor time that a process used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_of(pid: int) -> int:
    """The one child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Rise of the line through (x, y) by least squares; 0 of fewer than two places."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


class Page:
    """The metrics page: samples by name{labels}."""

    def __init__(self, text: str) -> None:
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        self.samples = {name: float(value) for name, value in rows}

    @classmethod
    def read(cls, url: str) -> Page:
        """Asks the server."""
        return cls(httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text)

    def total(self, name: str, *having: str) -> float:
        """Sum over the samples of a metric whose labels contain every `having`."""
        return sum(
            value
            for key, value in self.samples.items()
            if key.split("{")[0] == f"lockstep_{name}" and all(part in key for part in having)
        )

    def share(self, name: str) -> float:
        """The share of blocks or slots that is not free."""
        return 1.0 - self.total(name, 'state="free"') / self.total(name)

    def left(self) -> dict[str, float]:
        """What is not 0 although nothing is being served."""
        gauges = {
            "requests running": self.total("requests_running"),
            "requests waiting": self.total("requests_waiting"),
            "tokens waiting": self.total("requests_waiting_tokens"),
            "blocks in use": self.total("kv_blocks", 'state="used"'),
            "slots in use": self.total("state_slots", 'state="used"'),
            "server tables": self.total("server_registry_entries"),
        }
        for registry in ("requests", "leases", "steps"):  # the others are cleaned up by the next step
            gauges[f"engine's {registry}"] = self.total("engine_registry_entries", f'"{registry}"')
        return {name: value for name, value in gauges.items() if value}


@dataclass
class Watch:
    """Samples of one server: (requests begun, bytes) of each process, pool shares, sizes of the page."""

    url: str
    server: int
    engine: int
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"server": [], "engine": []})
    blocks: list[float] = field(default_factory=list)
    slots: list[float] = field(default_factory=list)
    series: list[int] = field(default_factory=list)
    tables: list[float] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)  # (time, the engine's processor time)

    def look(self, begun: int) -> Page:
        """One sample of everything."""
        page = Page.read(self.url)
        for name, pid in (("server", self.server), ("engine", self.engine)):
            self.memory[name].append((begun, memory_of(pid)))
        self.cpu.append((time.monotonic(), cpu_of(self.engine)))
        self.blocks.append(page.share("kv_blocks"))
        self.slots.append(page.share("state_slots"))
        self.series.append(len(page.samples))
        self.tables.append(page.total("engine_registry_entries") + page.total("server_registry_entries"))
        return page

    def busy(self) -> float:
        """Cores that the engine used between the last two samples: little, while answers stay away, means starved."""
        if len(self.cpu) < 2:
            return 0.0
        (start, before), (end, after) = self.cpu[-2:]
        return (after - before) / (end - start)

    def quarters(self, name: str) -> list[float]:
        """Bytes per request in each quarter of the run: a leak is in all of them, warming up in the first."""
        points = self.memory[name]
        step = max(1, len(points) // 4)
        return [slope(points[first : first + step]) for first in range(0, 4 * step, step)]

    def growth(self, name: str, warm: int) -> tuple[float, float]:
        """Of a process after its first `warm` samples: bytes per request, and bytes in all."""
        points = self.memory[name][warm:]
        rise = slope(points)
        return rise, rise * (points[-1][0] - points[0][0]) if points else 0.0
