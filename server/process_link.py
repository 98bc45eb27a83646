"""The engine in a process of its own: spawns `python -m runtime worker` and speaks frames over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

import msgspec

from runtime.api import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    Cancel,
    CancelReason,
    Delta,
    EngineConfig,
    EngineStats,
    Fatal,
    ModelInfo,
    Progress,
    Ready,
    Report,
    Request,
    Shutdown,
    Start,
    Submit,
    ToServer,
    frame,
)
from server.link import EngineLink, Inbox, StartError, Switchboard

CLOSE_SECONDS = 5.0
_log = logging.getLogger(__name__)


def worker_command(fd: int) -> list[str]:
    """The worker's command line. `-P` keeps the current directory out of its import path."""
    return [sys.executable, "-P", "-m", "runtime", "worker", "--fd", str(fd)]


class ProcessLink(EngineLink):
    """Owns the engine process: its life, its socket, and the verdict whether it still makes progress.

    The process is started by the constructor, before an event loop exists, so that it loads while this process imports
    its web modules. It has a session of its own: Ctrl-C reaches the server alone, which then ends the engine in order.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        environment: Mapping[str, str] | None = None,
        stall_timeout: float = 60.0,
        on_progress: Callable[[Progress], None] | None = None,
        command: Callable[[int], list[str]] = worker_command,
    ) -> None:
        self._board = Switchboard()
        self._on_progress = on_progress
        self._stall_timeout = stall_timeout
        self._decoder = msgspec.msgpack.Decoder(ToServer)
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours
        ours.sendall(frame(Start(config)))

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    async def start(self) -> ModelInfo:
        """Waits for `Ready`, reporting progress on the way."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            while True:
                match await self._read(reader):
                    case Progress() as progress:
                        if self._on_progress is not None:
                            self._on_progress(progress)
                    case Ready(info):
                        break
                    case Fatal(message, config):
                        raise StartError(message, config=config)
                    case Report():
                        pass
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError) as error:
            note = await self._exit_note()
            raise StartError(f"The engine process ended during start-up{note}.", config=False) from error
        self._board.touch()
        self._tasks = [asyncio.create_task(self._listen(reader)), asyncio.create_task(self._watch())]
        return info

    async def submit(self, request: Request, inbox: Inbox) -> None:
        """See `EngineLink`."""
        answer = self._board.open(request.id, inbox)
        self._send(Submit(request))
        await answer

    def cancel(self, request_id: str, reason: CancelReason, keep: int) -> None:
        """See `EngineLink`."""
        if self._board.detach(request_id):
            self._send(Cancel(request_id, reason, keep))

    def observe_last(self, callback: Callable[[Delta], None]) -> None:
        """See `EngineLink`."""
        self._board.on_last = callback

    def stats(self) -> EngineStats:
        """See `EngineLink`."""
        return self._board.stats

    def failure(self) -> str | None:
        """See `EngineLink`."""
        return None if self._board.failure is None else str(self._board.failure)

    def heartbeat_age(self) -> float:
        """See `EngineLink`."""
        return self._board.report_age

    def open_requests(self) -> int:
        """See `EngineLink`."""
        return len(self._board)

    async def close(self) -> None:
        """Asks the engine to end; kills it when it does not."""
        self._board.fail("The engine was stopped.")
        for task in self._tasks:
            task.cancel()
        if not self._tasks:  # still loading: it does not listen
            self._process.kill()
        if self._writer is None:
            self._socket.close()
        else:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write(frame(Shutdown()))
                await asyncio.wait_for(self._writer.drain(), CLOSE_SECONDS)
            self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the engine now, if it has not ended."""
        self._process.kill()
        self._process.wait()

    def _send(self, message: Submit | Cancel) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> ToServer:
        (size,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
        if size > MAX_FRAME_BYTES:
            raise ConnectionError("frame too large")
        message: ToServer = self._decoder.decode(await reader.readexactly(size))
        return message

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """The engine's voice until it falls silent."""
        try:
            while True:
                match await self._read(reader):
                    case Report() as report:
                        self._board.deliver(report)
                    case Fatal(message):
                        _log.error("engine failed: %s", message)
                        break
                    case Progress() | Ready():
                        self._board.touch()
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            pass
        self._board.fail("The engine stopped unexpectedly.")
        _log.error("engine process is gone%s", await self._exit_note())

    async def _watch(self) -> None:
        """Declares a silent engine dead: a stopped process or an endless step must not look healthy."""
        while self._board.failure is None:
            await asyncio.sleep(min(1.0, self._stall_timeout / 4))
            if self._board.report_age > self._stall_timeout:
                _log.error("engine made no progress for %.1f s", self._board.report_age)
                self._board.fail("The engine made no progress.")
                self._process.kill()

    async def _exit_note(self) -> str:
        try:
            code = await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        return f" (exit code {code})"
