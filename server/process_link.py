"""The engine in a process of its own: its lives one after another, and the verdict whether it makes progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from runtime.api import (
    Cancel,
    CancelReason,
    Delta,
    EngineConfig,
    EngineError,
    EngineStats,
    ModelInfo,
    Progress,
    Request,
    Submit,
)
from server.engine_process import EngineEndedError, EngineProcess, worker_command
from server.link import EngineLink, Health, Inbox, StartError, Switchboard
from server.logs import event
from server.restarts import Restarts
from server.totals import added

StallAction = Literal["report", "restart"]
WATCH_SECONDS = 1.0
GONE = {
    "crash": "The engine stopped unexpectedly.",
    "stall": "The engine made no progress.",
    "start": "The engine could not be restarted.",
}
_log = logging.getLogger(__name__)


class ProcessLink(EngineLink):
    """Owns the engine process: starts it, watches it, and starts it again when it ends, as `restarts` allows.

    Without progress for `stall_timeout` seconds the engine is stalled; with the action `restart` it is then killed. One
    that is not ready after `start_timeout` seconds is killed as well.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        restarts: Restarts,
        environment: Mapping[str, str] | None = None,
        stall_timeout: float = 60.0,
        stall_action: StallAction = "report",
        start_timeout: float = 1800.0,
        on_progress: Callable[[Progress], None] | None = None,
        command: Callable[[int], list[str]] = worker_command,
    ) -> None:
        self._restarts = restarts
        self._stall_timeout = stall_timeout
        self._stall_action = stall_action
        self._start_timeout = start_timeout
        self._on_progress = on_progress
        self._on_last: Callable[[Delta], None] | None = None
        self._on_restart: Callable[[str], None] | None = None
        self._on_ready: Callable[[ModelInfo], None] | None = None
        self._spawn = partial(EngineProcess, config, environment=environment, command=command)
        self._process = self._spawn()
        self._board = Switchboard()
        self._past: EngineStats | None = None
        self._sum = EngineStats(), EngineStats()  # the newest snapshot, and it with the past added
        self._health = Health.STARTING
        self._ready_at = 0.0
        self._life: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id of the newest engine."""
        return self._process.pid

    async def start(self) -> ModelInfo:
        """Waits until the first engine is ready, reporting progress on the way."""
        info = await self._begin()
        self._life = asyncio.create_task(self._live())
        return info

    async def submit(self, request: Request, inbox: Inbox) -> None:
        """See `EngineLink`."""
        answer = self._board.open(request.id, inbox)
        self._process.send(Submit(request))
        await answer

    def cancel(self, request_id: str, reason: CancelReason, keep: int) -> None:
        """See `EngineLink`."""
        if self._board.detach(request_id):
            self._process.send(Cancel(request_id, reason, keep))

    def observe_last(self, callback: Callable[[Delta], None]) -> None:
        """See `EngineLink`."""
        self._on_last = self._board.on_last = callback

    def observe_lives(self, on_restart: Callable[[str], None], on_ready: Callable[[ModelInfo], None]) -> None:
        """See `EngineLink`."""
        self._on_restart, self._on_ready = on_restart, on_ready

    def stats(self) -> EngineStats:
        """See `EngineLink`."""
        if self._past is None:
            return self._board.stats
        if self._sum[0] is not self._board.stats:
            self._sum = self._board.stats, added(self._past, self._board.stats)
        return self._sum[1]

    def health(self) -> Health:
        """See `EngineLink`."""
        return self._health

    def silence(self) -> float:
        """See `EngineLink`."""
        return self._board.silence

    def open_requests(self) -> int:
        """See `EngineLink`."""
        return len(self._board)

    def interrupt(self, error: EngineError) -> None:
        """See `EngineLink`."""
        self._board.interrupt(error)

    async def close(self) -> None:
        """Asks the engine to end; kills it when it does not."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        self._board.fail("The engine was stopped.")
        await self._process.end(patient=self._health is Health.SERVING)
        self._health = Health.ENDED

    def kill(self) -> None:
        """Ends the engine now, if it has not ended."""
        self._process.kill()

    async def _begin(self) -> ModelInfo:
        """Brings up the process that was spawned last; raises StartError, and then the process is no more."""
        try:
            async with asyncio.timeout(self._start_timeout):
                info = await self._process.start(self._on_progress)
        except TimeoutError:
            await self._process.end(patient=False)
            message = f"The engine was not ready within {self._start_timeout:g} seconds."
            raise StartError(message, config=False) from None
        except StartError:
            await self._process.end(patient=False)
            raise
        self._board = Switchboard()
        self._board.on_last = self._on_last
        self._ready_at = time.monotonic()
        self._health = Health.SERVING
        return info

    async def _live(self) -> None:
        """One engine after another, until no further one is allowed."""
        try:
            reason = await self._serve()
            while (delay := self._bury(reason)) is not None:
                await self._process.end(patient=False)
                await asyncio.sleep(delay)
                reason = await self._live_again(reason)
            await self._process.end(patient=False)
        except Exception:  # noqa: BLE001 - whatever it was, nobody watches the engine any more
            _log.exception("the engine's supervision failed")
            self._board.fail(GONE["crash"])
            self._health = Health.ENDED

    async def _live_again(self, reason: str) -> str:
        """One more life; returns why it ended."""
        if self._on_restart is not None:
            self._on_restart(reason)
        try:
            self._process = self._spawn()
            info = await self._begin()
        except (StartError, OSError) as error:
            event(_log, logging.ERROR, "engine did not start again", error=str(error))
            return "start"
        event(_log, logging.WARNING, "engine is ready again", pid=self.pid)
        if self._on_ready is not None:
            self._on_ready(info)
        return await self._serve()

    async def _serve(self) -> str:
        """Spreads what the engine says until it ends or is to be ended; returns why."""
        listening = asyncio.create_task(self._listen())
        watching = asyncio.create_task(self._watch())
        try:
            done, _ = await asyncio.wait({listening, watching}, return_when=asyncio.FIRST_COMPLETED)
            return (listening if listening in done else watching).result()
        finally:
            listening.cancel()
            watching.cancel()
            await asyncio.gather(listening, watching, return_exceptions=True)

    async def _listen(self) -> str:
        try:
            async for report in self._process.reports():
                self._board.deliver(report)
        except EngineEndedError as error:
            self._board.fail(GONE["crash"])  # before anything is waited for
            self._health = Health.RESTARTING
            event(_log, logging.ERROR, "engine is gone", error=str(error), exit=await self._process.exit_note())
        return "crash"

    async def _watch(self) -> str:
        """Says when the engine stalls and when it goes on; ends when something must be done about it."""
        tick = min(WATCH_SECONDS, self._stall_timeout / 4)
        before = time.monotonic()
        ended = False
        while True:
            await asyncio.sleep(tick)
            before, late = time.monotonic(), time.monotonic() - before - tick
            if late > tick:  # this process was stopped or starved, and has not read what the engine said meanwhile
                self._board.forgive(late)
            if ended:
                return "crash"
            ended = self._process.ended  # its socket says so first, unless something it started still holds that
            stalled = self._board.silence > self._stall_timeout
            if stalled and self._health is Health.SERVING:
                self._health = Health.STALLED
                event(_log, logging.ERROR, "engine makes no progress", seconds=self._board.silence)
            elif not stalled and self._health is Health.STALLED:
                self._health = Health.SERVING
                event(_log, logging.WARNING, "engine makes progress again")
            if stalled and self._stall_action == "restart":
                return "stall"

    def _bury(self, reason: str) -> float | None:
        """Whoever waits is told; returns the seconds until the next start, None when there will be none."""
        served = time.monotonic() - self._ready_at if reason != "start" else 0.0
        delay = self._restarts.next_delay(served)
        self._health = Health.ENDED if delay is None else Health.RESTARTING
        self._board.fail(GONE[reason])
        self._past = self.stats()
        self._board.stats = EngineStats()
        if delay is None:
            event(_log, logging.ERROR, "engine is not restarted again", reason=reason)
        else:
            event(_log, logging.WARNING, "engine is restarted", reason=reason, seconds=delay)
        return delay
