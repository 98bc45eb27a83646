"""An engine in this process, driven by one thread: the link of tests and of offline use."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from runtime.api import (
    Accepted,
    Cancel,
    CancelReason,
    Delta,
    EngineCore,
    EngineError,
    EngineStats,
    ModelInfo,
    Rejected,
    Report,
    Request,
    Shutdown,
    Submit,
)
from server.link import EngineLink, Health, Inbox, Switchboard

HEARTBEAT_SECONDS = 0.25
_log = logging.getLogger(__name__)


class InlineLink(EngineLink):
    """Drives `core` exactly like the worker does: apply all messages, step, report."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._board = Switchboard()
        self._messages: queue.SimpleQueue[Submit | Cancel | Shutdown] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._health = Health.STARTING

    async def start(self) -> ModelInfo:
        """Starts the driving thread."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._drive, args=(loop,), name="engine", daemon=True)
        self._thread.start()
        self._health = Health.SERVING
        return self._core.info

    async def submit(self, request: Request, inbox: Inbox) -> None:
        """See `EngineLink`."""
        answer = self._board.open(request.id, inbox)
        self._messages.put(Submit(request))
        await answer

    def cancel(self, request_id: str, reason: CancelReason, keep: int) -> None:
        """See `EngineLink`."""
        if self._board.detach(request_id):
            self._messages.put(Cancel(request_id, reason, keep))

    def observe_last(self, callback: Callable[[Delta], None]) -> None:
        """See `EngineLink`."""
        self._board.on_last = callback

    def stats(self) -> EngineStats:
        """See `EngineLink`."""
        return self._board.stats

    def observe_lives(self, on_restart: Callable[[str], None], on_ready: Callable[[ModelInfo], None]) -> None:
        """An engine in this process has one life."""

    def health(self) -> Health:
        """See `EngineLink`."""
        return self._health

    def silence(self) -> float:
        """See `EngineLink`."""
        return self._board.silence

    def interrupt(self, error: EngineError) -> None:
        """See `EngineLink`."""
        self._board.interrupt(error)

    def open_requests(self) -> int:
        """See `EngineLink`."""
        return len(self._board)

    async def close(self) -> None:
        """Ends the thread at the next step boundary."""
        if self._thread is not None:
            self._messages.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._end("The engine was stopped.")

    def _end(self, message: str) -> None:
        self._health = Health.ENDED
        self._board.fail(message)

    def _drive(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while (answers := self._apply()) is not None:
                deltas = tuple(self._core.step()) if self._core.has_work else ()
                loop.call_soon_threadsafe(self._board.deliver, Report(tuple(answers), deltas, self._core.stats()))
        except Exception:  # noqa: BLE001 - whatever it was, the engine is gone
            _log.exception("the engine failed")
            loop.call_soon_threadsafe(self._end, "The engine failed.")

    def _apply(self) -> list[Accepted | Rejected] | None:
        """All waiting messages, answered; waits for one when there is nothing to do. None ends the thread."""
        answers: list[Accepted | Rejected] = []
        idle = not self._core.has_work
        while True:
            try:
                message = self._messages.get(block=idle, timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                return answers
            idle = False
            match message:
                case Submit(request):
                    answers.append(self._core.submit(request))
                case Cancel(request_id, reason, keep):
                    self._core.cancel(request_id, reason, keep)
                case Shutdown():
                    return None
