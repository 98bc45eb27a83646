"""One life of the engine process: spawns `python -m runtime worker` and speaks frames over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from runtime.api import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    EngineConfig,
    EngineError,
    Fatal,
    ModelInfo,
    Progress,
    Ready,
    Report,
    Shutdown,
    Start,
    ToEngine,
    ToServer,
    frame,
)
from server.link import StartError

CLOSE_SECONDS = 5.0
_decoder = msgspec.msgpack.Decoder(ToServer)
_BROKEN = (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError)


class EngineEndedError(EngineError):
    """The engine process fell silent; the message says what is known of the reason."""


def worker_command(fd: int) -> list[str]:
    """The worker's command line. `-P` keeps the current directory out of its import path."""
    return [sys.executable, "-P", "-m", "runtime", "worker", "--fd", str(fd)]


class EngineProcess:
    """A worker and the socket to it. `start` once, then read `reports` and `send`; `end` or `kill` in any state.

    The process is spawned by the constructor, before an event loop need exist, so that it loads while this process
    imports its web modules. It has a session of its own: Ctrl-C reaches the server alone, which ends the engine in
    order, and a kill takes along whatever the engine started.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        environment: Mapping[str, str] | None = None,
        command: Callable[[int], list[str]] = worker_command,
    ) -> None:
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._listens = False
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
        """The process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is no more, whoever still holds its socket."""
        return self._process.returncode is not None or self._exited()

    async def start(self, on_progress: Callable[[Progress], None] | None) -> ModelInfo:
        """Waits for `Ready`; raises StartError."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            while True:
                match await self._read():
                    case Progress() as progress:
                        if on_progress is not None:
                            on_progress(progress)
                    case Ready(info):
                        self._listens = True
                        return info
                    case Fatal(message, config):
                        raise StartError(message, config=config)
                    case Report():
                        pass
        except _BROKEN as error:
            note = await self.exit_note()
            raise StartError(f"The engine process ended during start-up ({note}).", config=False) from error

    async def reports(self) -> AsyncIterator[Report]:
        """What it says, step by step; raises EngineEndedError when it falls silent."""
        try:
            while True:
                match await self._read():
                    case Report() as report:
                        yield report
                    case Fatal(message):
                        raise EngineEndedError(message)
                    case Progress() | Ready():
                        pass
        except _BROKEN:
            raise EngineEndedError("its process ended") from None

    def send(self, message: ToEngine) -> None:
        """Queues a message; without effect once the engine is gone."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def exit_note(self) -> str:
        """How the process ended, which it may still be about to do."""
        code = await asyncio.to_thread(self._wait, CLOSE_SECONDS)
        if code is None:
            return "it still runs"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    async def end(self, *, patient: bool) -> None:
        """Asks the engine to end, if there is hope that it listens, and kills it when it does not."""
        if patient and self._listens and self._writer is not None:
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                self._writer.write(frame(Shutdown()))
                await asyncio.wait_for(self._writer.drain(), CLOSE_SECONDS)
            self._close_socket()
            await asyncio.to_thread(self._wait, CLOSE_SECONDS)
        self._close_socket()
        self._signal_all()
        await asyncio.to_thread(self._wait, CLOSE_SECONDS)

    def kill(self) -> None:
        """Ends it now, if it has not ended."""
        self._signal_all()
        self._wait(CLOSE_SECONDS)

    def _close_socket(self) -> None:
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()

    def _exited(self) -> bool:
        """Whether the process is a zombie. It stays one, so that its group's number is not given to another."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _signal_all(self) -> None:
        """SIGKILL to the process and all that it started."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    def _wait(self, seconds: float) -> int | None:
        """The exit code; None when it takes longer. What the process started ends with it."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        self._signal_all()
        return self._process.wait()

    async def _read(self) -> ToServer:
        (size,) = FRAME_HEADER.unpack(await self._reader.readexactly(FRAME_HEADER.size))
        if size > MAX_FRAME_BYTES:
            raise ConnectionError("frame too large")
        message: ToServer = _decoder.decode(await self._reader.readexactly(size))
        return message
