"""What engine processes counted that are no more: counters on the metrics page must not fall when one is restarted."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from runtime.api import Distribution, EngineStats

# Of an engine that ended nothing of these is left. Every other field of `EngineStats` counts.
GAUGES = frozenset(
    {
        "running",
        "waiting_seqs",
        "waiting_kv",
        "waiting_state",
        "waiting_deferred",
        "waiting_tokens",
        "registries",
        "kv_blocks_used",
        "kv_blocks_cached",
        "kv_blocks_total",
        "state_slots_used",
        "state_slots_cached",
        "state_slots_total",
        "memory_bytes",
        "checkpoints",
        "checkpoints_total",
    }
)
# Of these the larger one counts; the size of a slot is a factor of a counter.
LARGEST = frozenset({"last_step_time", "audit_worst", "state_slot_bytes"})


def added(past: EngineStats, now: EngineStats) -> EngineStats:
    """A new snapshot: the counters of both, the gauges of `now`."""
    fields = now.__struct_fields__
    before, after = msgspec.structs.asdict(past), msgspec.structs.asdict(now)
    return EngineStats(**{name: _joined(name, before[name], after[name]) for name in fields})


def _joined(name: str, past: Any, now: Any) -> Any:
    if name in GAUGES:
        return now
    if name in LARGEST:
        return max(past, now)
    return _sum(past, now)


def _sum(past: Any, now: Any) -> Any:
    match now:
        case dict():
            return now | {key: _sum(value, now[key]) if key in now else value for key, value in past.items()}
        case list():
            return [a + b for a, b in itertools.zip_longest(past, now, fillvalue=0)]
        case Distribution():
            return Distribution(_sum(past.counts, now.counts), past.total + now.total)
    return past + now
