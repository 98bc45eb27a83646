"""The engine process of link and command tests: the real framing around a scripted engine.

usage: python -m tests.server.fake_worker FD MODE

Modes: `ok`; `config`, `fatal`, `exit`, `loading` do not get ready; `once:PATH` does so only while PATH does not exist,
and makes it; `die` and `silent` do so at the first submission; `hold` says on and on that it works on a request after
six tokens, without a step, until the prompt (9,) comes.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from pathlib import Path

import msgspec

from runtime.api import FRAME_HEADER, Cancel, Fatal, Progress, Ready, Report, Shutdown, Start, Submit, ToEngine, frame
from tests.support.fake_engine import FakeEngine


def messages(
    connection: socket.socket, buffer: bytearray, decoder: msgspec.msgpack.Decoder[ToEngine]
) -> list[ToEngine]:
    part = connection.recv(1 << 20)
    if not part:
        raise EOFError
    buffer += part
    found: list[ToEngine] = []
    while len(buffer) >= FRAME_HEADER.size:
        (size,) = FRAME_HEADER.unpack_from(buffer)
        if len(buffer) < FRAME_HEADER.size + size:
            break
        found.append(decoder.decode(bytes(buffer[FRAME_HEADER.size : FRAME_HEADER.size + size])))
        del buffer[: FRAME_HEADER.size + size]
    return found


def main(fd: int, mode: str) -> None:
    connection = socket.socket(fileno=fd)
    decoder = msgspec.msgpack.Decoder(ToEngine)
    buffer = bytearray()
    (start,) = messages(connection, buffer, decoder)
    assert isinstance(start, Start)
    connection.sendall(frame(Progress("load", 0.5)))
    if mode == "config":
        connection.sendall(frame(Fatal("This combination cannot work.", config=True)))
    elif mode == "fatal":
        connection.sendall(frame(Fatal("Out of memory.")))
    if mode in ("config", "fatal", "exit"):
        return
    if mode.startswith("once:"):
        try:
            Path(mode.removeprefix("once:")).touch(exist_ok=False)
        except FileExistsError:
            return
    if mode == "loading":
        time.sleep(60)
    engine = FakeEngine(max_queued=start.config.max_queued_requests)
    if mode == "hold":
        engine.freeze_after = 6
    connection.sendall(frame(Ready(engine.info)))
    while True:
        answers = []
        readable, _, _ = select.select([connection], [], [], 0 if engine.has_work else 0.25)
        for message in messages(connection, buffer, decoder) if readable else []:
            match message:
                case Submit(request):
                    if mode == "die":
                        sys.exit(3)
                    if mode == "silent":
                        time.sleep(60)
                    if mode == "hold" and request.prompt == (9,):
                        engine.freeze_after = None
                        engine.release()
                    answers.append(engine.submit(request))
                case Cancel(request_id, reason, keep):
                    engine.cancel(request_id, reason, keep)
                case Shutdown():
                    return
        deltas = tuple(engine.step()) if engine.has_work else ()
        connection.sendall(frame(Report(tuple(answers), deltas, engine.stats())))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2])
    except EOFError:
        sys.exit(0)
