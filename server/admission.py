"""Which requests are inside, and whether the door is still open. Capacity itself is the engine's to judge."""

from __future__ import annotations

import asyncio

from runtime.api import CapacityError, EngineError
from server.link import Inbox, UnavailableError


class Admission:
    """Owns the drain flag and the inboxes of requests in flight."""

    def __init__(self, limit: int) -> None:
        self.draining = False
        self._limit = limit
        self._inside: set[Inbox] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self) -> Inbox:
        """A new request comes in; raises UnavailableError while draining, CapacityError when it is full.

        The limit only guards this process against more requests than the engine could ever hold. Pair with `leave`.
        """
        if self.draining:
            raise UnavailableError("The server is shutting down; try again later.")
        if len(self._inside) >= self._limit:
            raise CapacityError("The server's queue is full; try again later.")
        inbox = Inbox()
        self._inside.add(inbox)
        self._empty.clear()
        return inbox

    def leave(self, inbox: Inbox) -> None:
        """A request is finished, however it ended. Leaving twice is harmless."""
        self._inside.discard(inbox)
        if not self._inside:
            self._empty.set()

    def close(self) -> None:
        """From now on nobody enters."""
        self.draining = True

    async def drained(self, timeout: float) -> bool:
        """Waits until everybody left; false when `timeout` seconds were not enough."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def interrupt(self, error: EngineError) -> None:
        """Ends every request inside with an error its client sees."""
        for inbox in self._inside:
            inbox.fail(error, at_once=True)
