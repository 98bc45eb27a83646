"""When an engine that ended is started again: how often in a row, and after how long a wait."""

from __future__ import annotations

MAX_DELAY = 60.0


class Restarts:
    """Counts restarts in a row. Knows no clock: it is told how long each engine served.

    `limit` restarts are allowed in a row; the first comes after `backoff` seconds, each further one after twice as
    many, at most `MAX_DELAY`. An engine that served for `reset` seconds ends the row.
    """

    def __init__(self, limit: int, backoff: float, reset: float) -> None:
        self._limit = limit
        self._backoff = backoff
        self._reset = reset
        self._in_a_row = 0

    def next_delay(self, served: float) -> float | None:
        """Seconds to wait before the next start after an engine that was ready for `served`; None: no more."""
        if served >= self._reset:
            self._in_a_row = 0
        if self._in_a_row >= self._limit:
            return None
        delay = min(self._backoff * 2.0**self._in_a_row, MAX_DELAY)
        self._in_a_row += 1
        return delay
