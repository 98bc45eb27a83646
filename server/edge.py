"""The outermost layer: request id, keys, metrics, the log line, and the last catch. Pure ASGI, nothing is buffered."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import logs
from server.auth import OPEN_PATHS
from server.errors import ApiError, from_exception
from server.logs import event
from server.metrics import ROUTES
from server.service import Service

REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,128}")
MAX_HEADER_BYTES = 64 * 1024
_log = logging.getLogger(__name__)


def route_label(path: str) -> str:
    """A path as one of a fixed set of names."""
    if path in ROUTES and path != "other":
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


class Edge:
    """Wraps the application; owns nothing but the request it is looking at."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}".encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        logs.request_id.set(request_id.decode())  # the server gives every request a task, and so a context, of its own
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id)]
                if self._service.admission.draining:  # the next request shall go to another server
                    added.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        started = self._service.meter.http_started()
        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await refusal.response()(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - nothing may pass the edge
            _log.exception("request failed")
            if status == 0:
                await from_exception(error).response()(scope, receive, send_with_id)
        finally:
            route = route_label(scope["path"])
            self._service.meter.http_ended(route, scope["method"], status or 499, started)
            event(
                _log,
                logging.DEBUG if route in OPEN_PATHS else logging.INFO,
                "request",
                method=scope["method"],
                route=route,
                status=status or 499,
                seconds=time.perf_counter() - started,
            )

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
        if size > MAX_HEADER_BYTES:
            return ApiError(431, "The request headers are too large.", headers={"Connection": "close"})
        if scope["method"] != "OPTIONS" and not self._service.keys.allow(scope["path"], headers.get(b"authorization")):
            self._service.meter.request_rejected("auth")
            return ApiError(401, "A valid API key is required.", headers={"WWW-Authenticate": "Bearer"})
        return None
