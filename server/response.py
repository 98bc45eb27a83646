"""The HTTP response of a generation: a stream of events or one JSON body, and the watch for a client that leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.api import CancelReason, EngineError
from server.answer import Answer
from server.errors import DeadlineError, from_exception
from server.link import Inbox
from server.logs import event
from server.render import Renderer

CLIENT_GONE = 499  # nobody sees it but logs, metrics and traces
DONE = b"data: [DONE]\n\n"
_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class ClientGoneError(EngineError):
    """The client closed its connection. Nobody will read a response."""


def sse(message: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(message) + b"\n\n"


def reason_of(error: Exception) -> CancelReason:
    """Why the engine is told to stop when an answer fails here."""
    return CancelReason.DEADLINE if isinstance(error, DeadlineError) else CancelReason.SHUTDOWN


class AnswerResponse(Response):
    """Delivers one answer. `leave` is called when it is over, however it ended."""

    def __init__(self, answer: Answer, renderer: Renderer, inbox: Inbox, leave: Callable[[], None]) -> None:
        self.answer = answer
        self._renderer = renderer
        self._inbox = inbox
        self._leave = leave
        self._outcome = "done"
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the generation to its end, or until the client is gone."""
        watch = asyncio.create_task(self._watch(receive))
        reason = CancelReason.CLIENT_GONE
        try:
            if self.answer.job.fields.stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        except (ClientGoneError, OSError):
            self._outcome = "client gone"
            self.answer.trace.fail("client_gone", CLIENT_GONE)
        except EngineError as error:
            self._outcome = "failed"
            reason = reason_of(error)
            seen = from_exception(error)
            self.answer.trace.fail(seen.kind, seen.status)
            raise
        finally:
            watch.cancel()
            self.answer.close(reason)
            self._leave()
            self._tell()

    def _tell(self) -> None:
        """What became of it, for the log and the trace."""
        answer, usage, trace = self.answer, self.answer.usage(), self.answer.trace
        event(
            _log,
            logging.INFO,
            "generation",
            answer=answer.job.id,
            outcome=self._outcome,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            drafted=usage.drafted_tokens,
            accepted=usage.accepted_tokens,
            trace=trace.trace_id,
        )
        trace.use(
            prompt=usage.prompt_tokens,
            cached=usage.cached_tokens,
            completion=usage.completion_tokens,
            drafted=usage.drafted_tokens,
            accepted=usage.accepted_tokens,
        )
        if self._outcome == "done":
            trace.finish(answer.finish_reasons)
        trace.end()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._inbox.fail(ClientGoneError("client gone"), at_once=True)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        collected = [piece async for pieces in self.answer.pieces() for piece in pieces]
        body = self._renderer.body(collected, self.answer.usage())
        await Response(_encode(body), media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - the headers are out, an error frame is all that is left
            if not isinstance(error, EngineError):
                _log.exception("stream failed")
            self._outcome = "failed"
            self.answer.close(reason_of(error))
            seen = from_exception(error)
            self.answer.trace.fail(seen.kind, None)
            data = sse(seen.body()) + DONE
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        renderer = self._renderer
        opening = b"".join(map(sse, renderer.opening()))
        if opening:
            yield opening
        async for pieces in self.answer.pieces():
            yield b"".join([sse(renderer.chunk(piece)) for piece in pieces])
        if self.answer.job.include_usage:
            yield sse(renderer.usage_chunk(self.answer.usage()))
        yield DONE
