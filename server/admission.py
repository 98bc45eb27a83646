"""Who is inside, whether the door is still open, and whether there is room: asked before anything is parsed.

A request is *coming* from the first line of its body until the engine took it; from then on the engine's own gauges
count it, and they arrive together with its acceptance, so nobody is counted twice or not at all. What a coming request
will cost is first guessed from the size of its body and corrected twice: when its fields are known, and when its
prompt is in tokens. The engine has the last word, by the same rule.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.api import CapacityError, EngineError, EngineStats, RejectReason, RequestError
from server.link import Inbox, UnavailableError, waiting_in

FIRST_BYTES_PER_TOKEN = 4.0
MEMORY_BYTES = 1 << 20  # of bodies that `Guess` remembers
MAX_RETRY_AFTER = 60
NUM_ENDS = 64  # last ends from which the pace is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What may wait: requests and their tokens (0: any number), beside `seats` that are computed at once."""

    seats: int
    requests: int
    tokens: int


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request inside: where its answer arrives, and the generations and tokens it brings while it is coming.

    Written by Admission only.
    """

    inbox: Inbox = field(default_factory=Inbox)
    generations: int = 0
    tokens: int = 0
    taken: bool = False


class Guess:
    """Tokens of a body that was not read yet: its bytes over the bytes per token of the bodies before it."""

    def __init__(self) -> None:
        self._bytes = FIRST_BYTES_PER_TOKEN
        self._tokens = 1.0

    def tokens(self, num_bytes: int) -> int:
        """The guess."""
        return math.ceil(num_bytes * self._tokens / self._bytes)

    def learn(self, num_bytes: int, num_tokens: int) -> None:
        """What a body really held. Old bodies are forgotten by halves."""
        self._bytes += num_bytes
        self._tokens += num_tokens
        if self._bytes > MEMORY_BYTES:
            self._bytes /= 2
            self._tokens /= 2


class Pace:
    """How long until half of those who wait are gone, by the latest ends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)

    def ended(self) -> None:
        """A request ended."""
        self._ends.append(self._clock())

    def retry_after(self, waiting: int) -> int:
        """Whole seconds, at least 1; 1 when nothing is known."""
        seconds = self._clock() - self._ends[0] if self._ends else 0.0
        if seconds <= 0.0:
            return 1
        return max(1, min(math.ceil(waiting / 2 * seconds / len(self._ends)), MAX_RETRY_AFTER))


class Admission:
    """Owns the drain flag, the requests inside, and the answer to whether one more may come in."""

    def __init__(
        self, room: Room, read_stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.draining = False
        self._room = room
        self._read_stats = read_stats
        self._inside: set[Ticket] = set()
        self._coming = Ticket()  # the sums over all that are coming
        self._empty = asyncio.Event()
        self._empty.set()
        self._guess = Guess()
        self._pace = Pace(clock)

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, num_bytes: int = 0) -> Ticket:
        """A request comes in with a body of so many bytes (0: unknown). Pair with `leave`.

        Raises UnavailableError while draining, CapacityError when one generation of such a prompt is too much.
        """
        if self.draining:
            raise UnavailableError("The server is shutting down; try again later.")
        ticket = Ticket()
        self._admit(ticket, 1, self._guess.tokens(num_bytes))
        self._inside.add(ticket)
        self._empty.clear()
        return ticket

    def expect(self, ticket: Ticket, *, generations: int, num_bytes: int, longest: int) -> None:
        """The fields are known: prompts times n, and how long a prompt can be at most.

        Raises RequestError for more generations than could ever be taken, CapacityError for more than now.
        """
        most = self._room.seats + self._room.requests
        if generations > most:
            raise RequestError(f"At most {most} choices can be computed or wait at a time.", param="n")
        self._admit(ticket, generations, generations * min(self._guess.tokens(num_bytes), longest))

    def measure(self, ticket: Ticket, *, num_bytes: int, prompt_tokens: int, tokens: int) -> None:
        """The prompts are in tokens: `prompt_tokens` in the body, `tokens` over all generations."""
        self._guess.learn(num_bytes, prompt_tokens)
        self._admit(ticket, ticket.generations, tokens)

    def arrived(self, ticket: Ticket) -> None:
        """The engine took it, and counts it from now on."""
        self._note(ticket, 0, 0)
        ticket.taken = True

    def leave(self, ticket: Ticket) -> None:
        """A request is finished, however it ended. Leaving twice is harmless."""
        if ticket not in self._inside:
            return
        self._inside.remove(ticket)
        self._note(ticket, 0, 0)
        if ticket.taken:
            self._pace.ended()
        if not self._inside:
            self._empty.set()

    def refusal(self, reason: RejectReason) -> CapacityError:
        """The error of a request for which there is no room, with the time after which there may be."""
        stats = self._read_stats()
        waiting = waiting_in(stats) + self._coming.generations
        what = "requests" if reason is RejectReason.QUEUE_FULL else "prompt tokens"
        return CapacityError(f"Too many {what} are waiting; try again later.", self._pace.retry_after(waiting), reason)

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
        for ticket in self._inside:
            ticket.inbox.fail(error, at_once=True)

    def _admit(self, ticket: Ticket, generations: int, tokens: int) -> None:
        """Notes what a ticket brings, or raises CapacityError when that and everything that waits are too much.

        A seat that is free, and not for lack of blocks or slots, counts as a place more. One request is always taken
        when nothing else waits, however long.
        """
        stats, room = self._read_stats(), self._room
        waiting = waiting_in(stats) + self._coming.generations - ticket.generations
        short = stats.waiting_kv or stats.waiting_state
        free = 0 if short else max(0, room.seats - stats.running)
        if waiting + generations > room.requests + free:
            raise self.refusal(RejectReason.QUEUE_FULL)
        waiting_tokens = stats.waiting_tokens + self._coming.tokens - ticket.tokens
        if waiting and 0 < room.tokens < waiting_tokens + tokens:
            raise self.refusal(RejectReason.QUEUE_TOKENS)
        self._note(ticket, generations, tokens)

    def _note(self, ticket: Ticket, generations: int, tokens: int) -> None:
        self._coming.generations += generations - ticket.generations
        self._coming.tokens += tokens - ticket.tokens
        ticket.generations, ticket.tokens = generations, tokens
