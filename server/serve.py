"""`lockstep serve`: port first, then the engine process, then the web modules; signals; exit codes.

0 ended on request, 1 the engine failed, 2 a setting cannot work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from runtime.api import ConfigError, ModelInfo, Progress
from server import settings as settings_module
from server.console import Console
from server.engine_process import worker_command
from server.link import StartError
from server.logs import event
from server.process_link import ProcessLink
from server.restarts import Restarts
from server.settings import Settings
from server.tracing import Tracing, tracing_of

if TYPE_CHECKING:
    from server.service import Service
    from server.webserver import WebServer

BACKLOG = 2048
_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; raises ConfigError with one sentence."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"The host {host!r} is not known.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = "is already in use" if error.errno == 98 else f"cannot be used: {error.strerror}"
        raise ConfigError(f"Port {port} on {host} {reason}.") from error
    listener.setblocking(False)
    return listener


def limit_unread(listener: socket.socket, seconds: float) -> None:
    """Connections accepted here end when what was sent is neither acknowledged nor wanted for so long.

    This also covers what is still unread when a connection is being closed, and clients that vanished.
    """
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """A signal before anything was served: there is nothing to finish."""
    raise SystemExit(0)


class ProgressLines:
    """A line when a phase begins, and one a second while it lasts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._said = 0.0

    def __call__(self, progress: Progress) -> None:
        """Says what is worth saying."""
        now = time.monotonic()
        if progress.phase == self._phase and now - self._said < 1.0:
            return
        self._phase, self._said = progress.phase, now
        self._console.say("loading", f"{progress.phase} {progress.done:.0%}", phase=progress.phase, done=progress.done)


def resolved(settings: Settings, info: ModelInfo) -> dict[str, str]:
    """Every resolved choice, and the seconds of each phase of the start."""
    choices = {
        "model": settings.model_name,
        "architecture": info.architecture,
        "max_model_len": str(info.max_model_len),
        "speculative": settings.speculative,
    } | info.choices
    spent = {f"{phase}_s": f"{value:.2f}" for phase, value in info.startup_seconds.items()}
    return choices | spent


def words(choices: Mapping[str, str]) -> str:
    """Choices on one line."""
    return " ".join(f"{name}={value}" if " " not in value else f'{name}="{value}"' for name, value in choices.items())


def address_of(listener: socket.socket) -> str:
    """The URL people can use."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Run:
    """One life of the server: start, serve, drain, end."""

    def __init__(
        self, settings: Settings, service: Service, server: WebServer, listener: socket.socket, started: float
    ) -> None:
        self._settings = settings
        self._service = service
        self._server = server
        self._listener = listener
        self._started = started
        self._console = Console(settings.log_format)
        self._stop = asyncio.Event()
        self._now = asyncio.Event()

    async def until_stopped(self) -> int:
        """Serves until a signal or a failure; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        starting = asyncio.create_task(self._begin())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not stopping.done():
                starting.result()
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return 0
            serving.result()
            return 1
        except StartError as error:
            sys.stderr.write(f"lockstep serve: {error}\n")
            return 2 if error.config else 1
        except ConfigError as error:
            sys.stderr.write(f"lockstep serve: {error}\n")
            return 2
        finally:
            await self._end(serving, starting, stopping)

    async def _begin(self) -> None:
        model = await self._service.start()
        seconds = time.monotonic() - self._started
        self._service.meter.startup_total(seconds)
        address, choices = address_of(self._listener), resolved(self._settings, model.info)
        text = f"ready in {seconds:.2f} s on {address} {words(choices)}"
        self._console.say("ready", text, address=address, seconds=round(seconds, 2), **choices)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._now.set()
            return
        self._service.drain()
        self._stop.set()
        inside = len(self._service.admission)
        if inside:
            seconds = self._settings.drain_timeout
            text = f"finishing requests inside ({inside}), for {seconds:g} s at most; a second signal ends now"
            self._console.say("draining", text, inside=inside, seconds=seconds)

    async def _end(self, serving: asyncio.Task[None], *others: asyncio.Task[object]) -> None:
        """Lets running requests finish, then ends them, then the sockets, then the engine."""
        self._service.drain()
        waits = [
            asyncio.create_task(self._now.wait()),
            asyncio.create_task(self._finished()),
            asyncio.create_task(self._hopeless()),
        ]
        await asyncio.wait(waits, timeout=self._settings.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        if len(self._service.admission):
            event(_log, logging.WARNING, "requests cut off", count=len(self._service.admission))
        self._service.interrupt()
        await self._service.admission.drained(1.0)
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, 2.0)
        for task in (*waits, *others):
            task.cancel()
        await asyncio.gather(*waits, *others, return_exceptions=True)
        await self._service.link.close()

    async def _finished(self) -> None:
        """Ends once everybody inside has got everything."""
        await self._service.admission.drained(self._settings.drain_timeout)
        await self._server.flushed()

    async def _hopeless(self) -> None:
        """Ends once the engine cannot finish what is inside."""
        while self._service.loaded():
            await asyncio.sleep(0.25)


def run(settings: Settings, listener: socket.socket, link: ProcessLink, tracing: Tracing, started: float) -> int:
    """Everything that needs the web modules; they are imported while the engine process already loads."""
    from server import logs
    from server.app import create_app
    from server.service import Service
    from server.webserver import event_loop, web_server

    logs.configure(settings.log_level, settings.log_format)
    service = Service(settings, link, tracing)
    server = web_server(create_app(service), settings)
    with asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(Run(settings, service, server, listener, started).until_stopped())


def main(arguments: list[str], worker: Callable[[int], list[str]] = worker_command) -> int:
    """The command. `worker` makes the engine process's command line."""
    started = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):  # a container's first process has no default for them
        signal.signal(number, leave)
    try:
        settings = settings_module.load(arguments, os.environ).resolved()
        tracing = tracing_of(settings.tracing)
        listener = bind(settings.host, settings.port)
    except ConfigError as error:
        sys.stderr.write(f"lockstep serve: {error}\n")
        return 2
    limit_unread(listener, settings.write_timeout)
    console = Console(settings.log_format)
    console.say("starting", f"loading {settings.model_path}", model_dir=str(settings.model_path))
    link = ProcessLink(
        settings.engine_config(),
        environment=settings_module.worker_environment(os.environ),
        restarts=Restarts(settings.engine_restarts, settings.engine_restart_backoff, settings.engine_restart_reset),
        stall_timeout=settings.stall_timeout,
        stall_action=settings.stall_action,
        start_timeout=settings.engine_start_timeout,
        on_progress=ProgressLines(console),
        command=worker,
    )
    try:
        with listener:
            return run(settings, listener, link, tracing, started)
    finally:
        link.kill()
        tracing.close()
