"""The one place that knows what a failure looks like on the wire: exception to OpenAI error envelope."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from runtime.api import CapacityError, EngineError, RequestError
from server.link import UnavailableError

MAX_RETRY_AFTER = 120
MAX_MESSAGE_CHARS = 1000

# status -> (type, code) where an exception does not say better
KINDS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "slow_down"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "server_is_overloaded"),
    504: ("timeout_error", "deadline_exceeded"),
}


class DeadlineError(EngineError):
    """The time that a request may take is over."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request was not finished within its {seconds:g} seconds.")


class ApiError(Exception):
    """A failure as the client sees it. Everything that ends in an error response becomes one of these first."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        kind, default_code = KINDS.get(status, KINDS[500 if status >= 500 else 400])
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.type = kind
        self.param = param
        self.code = code or default_code
        self.headers = headers or {}

    @property
    def kind(self) -> str:
        """What went wrong, as one of few names."""
        return self.code or self.type

    def body(self) -> dict[str, Any]:
        """The envelope; all four keys, always."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The envelope as a complete HTTP response."""
        return Response(
            msgspec.json.encode(self.body()), self.status, headers=self.headers, media_type="application/json"
        )


def retry_later(status: int, message: str, seconds: int) -> ApiError:
    """An error the client may retry; SDKs obey `Retry-After` only up to 120 seconds."""
    return ApiError(status, message, headers={"Retry-After": str(max(1, min(seconds, MAX_RETRY_AFTER)))})


def field_path(location: tuple[int | str, ...]) -> str | None:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None


def from_validation(error: ValidationError) -> ApiError:
    """The first failure of a request model, naming the field and never quoting the value."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = field_path(first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"Invalid value for '{param}': {reason}" if param else reason, param=param)


def from_exception(error: Exception) -> ApiError:
    """Any exception as the client may see it. What is not known to be harmless says nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return from_validation(error)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, CapacityError):
        return retry_later(429, str(error), error.retry_after)
    if isinstance(error, DeadlineError):
        # Nobody gains by the retries an SDK makes by itself: the time is over.
        return ApiError(504, str(error), headers={"x-should-retry": "false"})
    if isinstance(error, UnavailableError):
        return retry_later(503, str(error), error.retry_after)
    if isinstance(error, HTTPException):
        message = {404: "This route does not exist.", 405: "This method is not allowed on this route."}
        headers = dict(error.headers) if error.headers else None
        return ApiError(error.status_code, message.get(error.status_code, "The request failed."), headers=headers)
    if isinstance(error, EngineError):
        return ApiError(500, "The engine failed to complete this request.", code="engine_error")
    return ApiError(500, "The server failed to complete this request.")
