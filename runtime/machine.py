"""What this machine gives us: CPU quota and memory. Asked once at start; every answer is printed."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """CPUs by affinity, cut by the cgroup's quota (v2 `cpu.max` or v1 `cfs_quota_us`); at least 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = _quota()
    return max(1, min(cpus, math.ceil(quota))) if quota is not None else max(1, cpus)


def available_memory() -> int:
    """Bytes that can be used without swapping, cut by the cgroup's limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, int(limit) - int(used))
    return max(available, 0)


def resident_memory() -> int:
    """Bytes of memory that this process has now."""
    pages = _read(Path("/proc/self/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def _quota() -> float | None:
    fields = _read(CGROUP / "cpu.max").split()
    if len(fields) == 2 and fields[0].isdigit():
        return int(fields[0]) / int(fields[1])
    quota = _read(CGROUP / "cpu/cpu.cfs_quota_us").strip()
    period = _read(CGROUP / "cpu/cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit():
        return int(quota) / int(period)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
