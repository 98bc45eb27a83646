"""Anyone can check the promise: recomputes a running request's state from nothing and compares."""

from __future__ import annotations

import logging

from runtime.api import CapacityError
from runtime.plan import Batch, Row
from runtime.probe import Probe, largest_difference, tolerance
from runtime.runner import ModelRunner
from runtime.state.pool import StatePool

log = logging.getLogger("lockstep.audit")

TOLERANCE = 1e-3


class Auditor:
    """Audits one row every `interval` steps (0: never), when nothing of it is in flight and the pool has room.

    `worst` is the largest relative difference seen; a difference beyond `tolerance` counts as a mismatch.
    """

    def __init__(self, pool: StatePool, runner: ModelRunner, interval: int) -> None:
        self._pool = pool
        self._runner = runner
        self._interval = interval
        self._steps = 0
        self.tolerance = max(TOLERANCE, tolerance(pool.kv.dtype))
        self.ok = 0
        self.mismatches = 0
        self.worst = 0.0

    def after_step(self, batch: Batch) -> None:
        """Called when a step has settled."""
        if not self._interval:
            return
        self._steps += 1
        if self._steps % self._interval == 0:
            row = batch.rows[(self._steps // self._interval) % len(batch.rows)]
            lease = row.lease
            if not (lease.closed or lease.closing or lease.in_flight or lease.computed == 0):
                self.audit(row)

    def audit(self, row: Row) -> float | None:
        """The largest difference between the slot's state and the state of tokens[:computed] computed from nothing.

        None when the pool has no room for a second copy.
        """
        lease = row.lease
        try:
            probe = Probe(self._pool, self._runner, lease.computed, "audit")
        except CapacityError:
            return None
        try:
            probe.prefill(row.seq.tokens[: lease.computed])
            difference = largest_difference(self._pool.peek(lease.slot), probe.states())
        finally:
            probe.close()
        self.worst = max(self.worst, difference)
        if difference <= self.tolerance:
            self.ok += 1
        else:
            self.mismatches += 1
            log.error("audit: the state of %s after %d tokens is off by %.3g", lease.owner, lease.computed, difference)
        return difference
