"""The engine process: applies the server's messages, steps the engine, sends one report per step."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence as Seq

import msgspec

from runtime.api import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    Accepted,
    Cancel,
    CapabilityError,
    ConfigError,
    Delta,
    EngineCore,
    Fatal,
    Progress,
    Ready,
    Rejected,
    Report,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    ToServer,
    frame,
)

log = logging.getLogger("lockstep.worker")

HEARTBEAT_SECONDS = 0.25
_decoder = msgspec.msgpack.Decoder(ToEngine)


class ProtocolError(Exception):
    """The server sent something that is no message, or not at this moment."""


class Channel:
    """Frames over a socket. Sending never waits: what the peer has not taken stays here, in order.

    `receive` raises EOFError when the peer is gone, ProtocolError on a frame that is too long or no known message.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    @property
    def backlog(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._out)

    def send(self, message: ToServer) -> None:
        """Queues a message and writes what the socket takes now."""
        self._out += frame(message)
        self.flush()

    def flush(self) -> None:
        """Writes what the socket takes now."""
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError) as error:
                raise EOFError("the server is gone") from error
            del self._out[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._selector.modify(self._sock, events)

    def receive(self, timeout: float, limit: int | None = None) -> list[ToEngine]:
        """All messages that are there, at most `limit`; waits up to `timeout` seconds for the first."""
        messages = self._complete(limit)
        if len(messages) == limit:
            return messages
        if messages:
            timeout = 0.0
        deadline = time.monotonic() + timeout
        while self._selector.select(max(0.0, deadline - time.monotonic())):
            if self._out:
                self.flush()
            if self._read():
                messages += self._complete(limit)
            if messages or time.monotonic() >= deadline:
                break
        return messages

    def close(self) -> None:
        """Writes what is left, waiting for the peer if need be, and closes."""
        self._sock.setblocking(True)
        self._sock.settimeout(1.0)
        try:
            self._sock.sendall(self._out)
        except OSError:
            log.debug("the server did not take the last messages")
        self._selector.close()
        self._sock.close()

    def _read(self) -> bool:
        try:
            data = self._sock.recv(1 << 20)
        except BlockingIOError:
            return False
        except ConnectionResetError as error:
            raise EOFError("the server is gone") from error
        if not data:
            raise EOFError("the server is gone")
        self._in += data
        return True

    def _complete(self, limit: int | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while len(self._in) >= FRAME_HEADER.size and len(messages) != limit:
            (length,) = FRAME_HEADER.unpack_from(self._in)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"the server sent a frame of {length} bytes, more than {MAX_FRAME_BYTES}")
            end = FRAME_HEADER.size + length
            if len(self._in) < end:
                break
            try:
                messages.append(_decoder.decode(bytes(self._in[FRAME_HEADER.size : end])))
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"the server sent a frame that is no message: {error}") from error
            del self._in[:end]
        return messages


def serve(channel: Channel, engine: EngineCore) -> None:
    """Steps until Shutdown or until the server is gone."""
    while True:
        answers: list[Accepted | Rejected] = []
        busy = engine.has_work
        for message in channel.receive(0.0 if busy else HEARTBEAT_SECONDS):
            match message:
                case Submit(request):
                    answers.append(engine.submit(request))
                case Cancel(id=name, reason=reason, keep=keep):
                    engine.cancel(name, reason, keep)
                case Shutdown():
                    return
                case Start():
                    raise ProtocolError("the server sent a second start message")
        busy = busy or engine.has_work
        deltas: Seq[Delta] = engine.step() if engine.has_work else ()
        if busy or answers or not channel.backlog:  # a heartbeat behind unread messages would say nothing new
            channel.send(Report(tuple(answers), tuple(deltas), engine.stats()))


def main(fd: int) -> int:
    """Runs an engine for the server at the other end of socket `fd`; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(fd, False)  # what the engine starts must not keep its line to the server open
    channel = Channel(socket.socket(fileno=fd))
    try:
        return _run(channel)
    except EOFError:
        return 0
    except ProtocolError as error:
        with contextlib.suppress(EOFError):
            channel.send(Fatal(f"the engine stopped: {error}"))
        return 1
    finally:
        channel.close()


class JsonLines(logging.Formatter):
    """A record as one JSON object, as the server writes its own."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC).isoformat(timespec="milliseconds")
        entry = {
            "time": moment.removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def log_to_stderr(form: str) -> None:
    """Warnings and errors of this process, `form` text or json."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _run(channel: Channel) -> int:
    start = _first(channel)
    log_to_stderr(start.config.log_format)
    channel.send(Progress("import", 0.0))
    began = time.perf_counter()
    from runtime.build import build_engine

    imported = time.perf_counter() - began
    try:
        engine = build_engine(start.config, lambda phase, done: channel.send(Progress(phase, done)))
    except (ConfigError, CapabilityError) as error:
        channel.send(Fatal(str(error), config=True))
        return 2
    except EOFError:
        raise
    except Exception as error:
        log.exception("the engine cannot start")
        channel.send(Fatal(f"the engine cannot start: {error}"))
        return 1
    info = msgspec.structs.replace(engine.info, startup_seconds={"import": imported, **engine.info.startup_seconds})
    # What lives now lives as long as the process: the collector need not walk through it between steps.
    gc.collect()
    gc.freeze()
    channel.send(Ready(info))
    try:
        serve(channel, engine)
    except (EOFError, ProtocolError):
        raise
    except Exception as error:
        log.exception("the engine cannot go on")
        channel.send(Fatal(f"the engine stopped on {type(error).__name__}"))
        return 1
    return 0


def _first(channel: Channel) -> Start:
    while True:
        for message in channel.receive(60.0, limit=1):
            if not isinstance(message, Start):
                raise ProtocolError(f"the server sent {type(message).__name__} where start was expected")
            return message
