"""Every metric family the server exports, as Prometheus sees it: name, type, labels and their fixed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from server.meter import base_labels
from server.metrics import PREFIX, TABLE, Row

# Labels that come from the scraped target, not from the server.
TARGET_LABELS = ("job", "instance", "namespace", "pod")
PARTS = ("_bucket", "_sum", "_count")

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """A family by its full name. `labels` maps each to all its values, or to nothing where they are not fixed."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


def of_row(row: Row) -> Family:
    """A row of the table."""
    common: dict[str, tuple[str, ...]] = dict.fromkeys(base_labels(row, "", ""), ())
    return Family(PREFIX + row.name, row.kind, row.help, common | dict(row.labels), row.buckets)


def _process(name: str, kind: Kind = "gauge") -> Family:
    return Family(f"process_{name}", kind, "", {})


# What the metrics library says of the HTTP process.
PROCESS = (
    _process("cpu_seconds_total", "counter"),
    _process("resident_memory_bytes"),
    _process("virtual_memory_bytes"),
    _process("start_time_seconds"),
    _process("open_fds"),
    _process("max_fds"),
)

FAMILIES: dict[str, Family] = {each.name: each for each in (*map(of_row, TABLE), *PROCESS)}


def resolve(name: str) -> tuple[Family, str] | None:
    """The family and part of a series name, or None when nothing exports it."""
    if name in FAMILIES:
        return FAMILIES[name], ""
    for part in PARTS:
        base = FAMILIES.get(name.removesuffix(part))
        if name.endswith(part) and base is not None and base.kind == "histogram":
            return base, part
    return None
