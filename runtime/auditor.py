"""Anyone can check the promise: recomputes a running request's state from nothing and compares."""

from __future__ import annotations

import logging

from runtime.api import CapacityError, StateError
from runtime.plan import Batch, Row
from runtime.probe import Probe, largest_difference, tolerance
from runtime.runner import ModelRunner
from runtime.state.pool import StatePool

log = logging.getLogger("lockstep.audit")

TOLERANCE = 1e-3
LONGEST = 4096  # tokens of a request that is audited: the recomputation happens inside one step


class Auditor:
    """Audits one row every `interval` steps (0: never), when the pool has room for a second copy of its state.

    `worst` is the largest relative difference seen; a difference beyond `tolerance` counts as a mismatch. `skipped`
    audits were due, but found no room or broke off.
    """

    def __init__(self, pool: StatePool, runner: ModelRunner, interval: int) -> None:
        self._pool = pool
        self._runner = runner
        self._interval = interval
        self._since = 0
        self._turn = 0
        self.tolerance = max(TOLERANCE, tolerance(pool.kv.dtype))
        self.ok = 0
        self.mismatches = 0
        self.skipped = 0
        self.worst = 0.0

    @property
    def due(self) -> bool:
        """Whether the next settled step is to be audited: nothing may be in flight behind it."""
        return 0 < self._interval <= self._since + 1

    def after_step(self, batch: Batch, *, quiet: bool) -> None:
        """Called when a step has settled; `quiet`: no other step is in flight."""
        if not (self.due and quiet):
            self._since += 1
            return
        self._since = 0
        rows = [row for row in batch.rows if row.live and 0 < row.lease.computed <= LONGEST]
        if rows:
            self._turn += 1
            try:
                self.audit(rows[self._turn % len(rows)])
            except StateError:
                raise
            except Exception:
                self.skipped += 1
                log.exception("an audit broke off")

    def audit(self, row: Row) -> float | None:
        """The largest difference between the slot's state and the state of tokens[:computed] computed from nothing.

        None when the pool has no room for a second copy.
        """
        lease = row.lease
        try:
            probe = Probe(self._pool, self._runner, lease.computed, "audit")
        except CapacityError:
            self.skipped += 1
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
