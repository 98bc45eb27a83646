"""How long one request may take, from its first line to the end of its answer."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from server.errors import ApiError, DeadlineError
from server.link import Inbox
from server.schema.common import MAX_TIMEOUT

HEADER = "X-Request-Timeout"


def seconds_in(header: str) -> float:
    """The header's value; raises ApiError."""
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= MAX_TIMEOUT:
        raise ApiError(400, f"{HEADER} must be a number of seconds above 0, at most {MAX_TIMEOUT:g}.", param=HEADER)
    return seconds


class Deadline:
    """When a request must have ended. The header and the body's `timeout` can each make it shorter; without either
    the server's default holds (0: none).
    """

    def __init__(self, header: str | None, default: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._given = None if header is None else seconds_in(header)
        self._default = default or None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float | None:
        """What the request may take in all; None: no limit."""
        return self._default if self._given is None else self._given

    @property
    def at(self) -> float | None:
        """The loop's time at which it is over."""
        return None if self.seconds is None else self._began + self.seconds

    def narrow(self, seconds: float | None) -> None:
        """The body says how long, if it does."""
        if seconds is not None:
            self._given = seconds if self._given is None else min(self._given, seconds)

    def error(self) -> DeadlineError:
        """What the client is told when it is over."""
        return DeadlineError(self.seconds or 0.0)

    def arm(self, inbox: Inbox) -> None:
        """From now on the end of time ends the answer."""
        if self.at is not None:
            self._timer = self._loop.call_at(self.at, partial(inbox.fail, self.error(), at_once=True))

    def disarm(self) -> None:
        """The answer has ended."""
        if self._timer is not None:
            self._timer.cancel()
