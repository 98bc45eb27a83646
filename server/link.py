"""The server's end of the door: what an engine link is, and the switchboard that routes reports to waiting requests.

Knows token ids only. One `Report` arrives per engine step; it is spread over per-request inboxes which grow without
ever making the engine wait (a request's inbox is bounded by its own `max_tokens`).
"""

from __future__ import annotations

import asyncio
import enum
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

from runtime.api import (
    Accepted,
    CancelReason,
    CapacityError,
    Delta,
    EngineError,
    EngineStats,
    ModelInfo,
    Rejected,
    RejectReason,
    Report,
    Request,
    RequestError,
)


class Health(enum.Enum):
    """How the engine is; the value is the phrase that probes answer with."""

    STARTING = "loading"
    SERVING = "ok"
    STALLED = "the engine makes no progress"
    RESTARTING = "the engine is restarting"
    ENDED = "the engine ended"


class UnavailableError(EngineError):
    """Nothing can be served at the moment: loading, draining, or the engine is gone. Becomes 503."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineGoneError(UnavailableError):
    """The engine died or stalled; requests in flight end with this."""


class StartError(EngineError):
    """The engine could not start. `config` is true when a setting is to blame."""

    def __init__(self, message: str, *, config: bool) -> None:
        super().__init__(message)
        self.config = config


class Inbox:
    """What the engine says to one HTTP request. Several generations (n > 1, batches) may share it."""

    def __init__(self) -> None:
        self._deltas: deque[Delta] = deque()
        self._news = asyncio.Event()
        self._failure: EngineError | None = None

    def put(self, delta: Delta) -> None:
        """Adds a delta; never blocks."""
        self._deltas.append(delta)
        self._news.set()

    def fail(self, error: EngineError, *, at_once: bool = False) -> None:
        """Ends the conversation: `receive` raises, by default once everything that came before was read."""
        if at_once:
            self._deltas.clear()
        self._failure = self._failure or error
        self._news.set()

    async def receive(self) -> list[Delta]:
        """All deltas that wait, at least one; raises what `fail` was given."""
        await self._news.wait()
        if not self._deltas and self._failure is not None:
            raise self._failure
        deltas = list(self._deltas)
        self._deltas.clear()
        if self._failure is None:
            self._news.clear()
        return deltas


RESTART_REASONS = ("crash", "stall", "start")  # it ended, it was killed for making no progress, it did not get ready


class EngineLink(Protocol):
    """A running engine as the HTTP process sees it."""

    @abstractmethod
    async def start(self) -> ModelInfo:
        """Waits until the engine is ready; raises `StartError`."""

    @abstractmethod
    async def submit(self, request: Request, inbox: Inbox) -> None:
        """Returns once the engine accepted; its deltas then go to `inbox`.

        Raises RequestError (the request is at fault), CapacityError (queue full) or UnavailableError.
        """

    @abstractmethod
    def cancel(self, request_id: str, reason: CancelReason, keep: int) -> None:
        """Takes a request back; nothing of it reaches its inbox any more. Unknown ids are ignored."""

    @abstractmethod
    def observe_last(self, callback: Callable[[Delta], None]) -> None:
        """Calls back with the last delta of every request, whether anybody listens to it or not."""

    @abstractmethod
    def observe_lives(self, on_restart: Callable[[str], None], on_ready: Callable[[ModelInfo], None]) -> None:
        """Calls back when a further engine is started, with one of `RESTART_REASONS`, and when that is ready."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The newest snapshot. Counters go on over restarts; gauges of an engine that ended are 0."""

    @abstractmethod
    def health(self) -> Health:
        """How the engine is."""

    @abstractmethod
    def silence(self) -> float:
        """Seconds since the engine last made progress: finished a step, or had nothing to do."""

    @abstractmethod
    def interrupt(self, error: EngineError) -> None:
        """Submissions that still wait for their answer, and all later ones, end with `error`."""

    @abstractmethod
    def open_requests(self) -> int:
        """Requests whose last delta has not come yet."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the engine."""


def waiting_in(stats: EngineStats) -> int:
    """Generations that wait in the engine, for whatever."""
    return stats.waiting_seqs + stats.waiting_kv + stats.waiting_state + stats.waiting_deferred


def refusal(rejected: Rejected) -> EngineError:
    """A `Rejected` as the exception `submit` raises."""
    if rejected.reason in (RejectReason.QUEUE_FULL, RejectReason.QUEUE_TOKENS):
        return CapacityError("The server's queue is full; try again later.", 1, rejected.reason)
    if rejected.reason is RejectReason.DRAINING:
        return UnavailableError("The server is shutting down; try again later.")
    code = rejected.code or ("context_length_exceeded" if rejected.reason is RejectReason.TOO_LONG else None)
    return RequestError(rejected.message, param=rejected.param, code=code)


class Switchboard:
    """Owns who waits for what: submissions for their answer, inboxes for their deltas. Lives on the event loop."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.failure: EngineError | None = None
        self.on_last: Callable[[Delta], None] | None = None
        self._progressed = time.monotonic()
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._inboxes: dict[str, Inbox | None] = {}  # None: nobody listens, the last delta has not come yet

    def __len__(self) -> int:
        return len(self._inboxes)

    @property
    def silence(self) -> float:
        """Seconds without progress."""
        return time.monotonic() - self._progressed

    def forgive(self, seconds: float) -> None:
        """Nobody could listen for so long: the engine's silence meanwhile says nothing."""
        self._progressed = min(self._progressed + seconds, time.monotonic())

    def open(self, request_id: str, inbox: Inbox) -> asyncio.Future[None]:
        """Registers a submission; the future ends with the engine's answer."""
        if self.failure is not None:
            raise self.failure
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        self._inboxes[request_id] = inbox
        return answer

    def detach(self, request_id: str) -> bool:
        """Stops delivery for an id; true when the engine still works on it."""
        if request_id not in self._inboxes:
            return False
        self._inboxes[request_id] = None
        return True

    def deliver(self, report: Report) -> None:
        """Spreads one report. It is progress unless work is waiting and no step was finished since the last one."""
        stepped = report.stats.step_serial != self.stats.step_serial
        idle = report.stats.running + waiting_in(report.stats) == 0
        if stepped or report.deltas or idle:
            self._progressed = time.monotonic()
        self.stats = report.stats
        for answer in report.answers:
            waiter = self._answers.pop(answer.id, None)
            if isinstance(answer, Rejected):
                self._inboxes.pop(answer.id, None)
            if waiter is None or waiter.done():
                continue
            if isinstance(answer, Accepted):
                waiter.set_result(None)
            else:
                waiter.set_exception(refusal(answer))
        for delta in report.deltas:
            inbox = self._inboxes.get(delta.request_id)
            if delta.finish is not None:
                self._inboxes.pop(delta.request_id, None)
                if self.on_last is not None:
                    self.on_last(delta)
            if inbox is not None:
                inbox.put(delta)

    def interrupt(self, error: EngineError) -> None:
        """Submissions end with `error`, those that wait and those that come; what was accepted goes on."""
        self.failure = self.failure or error
        for waiter in self._answers.values():
            if not waiter.done():
                waiter.set_exception(error)
        self._answers.clear()

    def fail(self, message: str) -> None:
        """The engine is gone: everybody who waits is told, everybody who comes is refused."""
        gone = EngineGoneError(message)
        self.interrupt(gone)
        for inbox in self._inboxes.values():
            if inbox is not None:
                inbox.fail(gone)
        self._inboxes.clear()
