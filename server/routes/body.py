"""Reading a request body: type, size, time, depth. What comes out is plain JSON data."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError

MAX_DEPTH = 64
CLOSE = {"Connection": "close"}


def too_large(limit: int) -> ApiError:
    """413; the connection is closed because the rest of the body is not read."""
    return ApiError(413, f"The request body is larger than {limit} bytes.", headers=dict(CLOSE))


def declared_bytes(request: Request) -> int:
    """The size that the headers announce; 0 when they do not say."""
    length = request.headers.get("content-length", "")
    return int(length[:18]) if length.isascii() and length.isdigit() else 0


async def read_body(request: Request, *, limit: int, timeout: float) -> bytes:
    """The body as bytes, counted while it comes."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(415, "The content type must be application/json.", headers=dict(CLOSE))
    if declared_bytes(request) > limit:
        raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(400, "The request body did not arrive in time.", headers=dict(CLOSE)) from None
    except ClientDisconnect:
        raise ApiError(400, "The request body is incomplete.", headers=dict(CLOSE)) from None
    return b"".join(chunks)


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN, no endless nesting, no numbers without end."""
    try:
        data = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(400, "The JSON of the request body is nested too deeply.") from None
    except msgspec.ValidationError:
        raise ApiError(400, "A number in the request body is out of range.") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError(400, "The request body is not valid JSON.") from None
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return data
    raise ApiError(400, "The JSON of the request body is nested too deeply.")
