"""The smallest HTTP client that can hang up at any moment: the load must not cost more than the server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Reply:
    """What came of one request. `complete`: the server said that the stream ended; `left`: we hung up before."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    complete: bool = False
    left: bool = False
    retry_after: int = 0


class Connection:
    """One keep-alive connection to one server, opened again when it was closed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: dict[str, Any], leave_after: int | None = None) -> Reply:
        """A streamed completion. Hangs up after `leave_after` events, 0: as soon as the request is sent."""
        reply = Reply()
        reader, writer = await self._open()
        data = json.dumps(body).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(data) + data
        )
        await writer.drain()
        if leave_after == 0:
            reply.left = True
            self.close()
            return reply
        headers = await self._headers(reader, reply)
        if reply.status != 200:
            answer = await reader.readexactly(int(headers["content-length"]))
            reply.error = answer.decode()
            reply.retry_after = int(headers.get("retry-after", "0"))
            if headers.get("connection") == "close":
                self.close()
            return reply
        events = 0
        while size := int(await reader.readline(), 16):
            chunk = await reader.readexactly(size + 2)
            events += self._take(chunk, reply)
            if leave_after is not None and events >= leave_after and not reply.complete:
                reply.left = True
                self.close()
                return reply
        await reader.readline()
        return reply

    def close(self) -> None:
        """Hangs up."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[1].is_closing() or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(self._host, self._port)
        return self._streams

    async def _headers(self, reader: asyncio.StreamReader, reply: Reply) -> dict[str, str]:
        reply.status = int((await reader.readline()).split()[1])
        headers: dict[str, str] = {}
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return headers

    def _take(self, chunk: bytes, reply: Reply) -> int:
        """The events of one chunk; the server never splits one."""
        events = 0
        for line in chunk.split(b"\n"):
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                reply.complete = not reply.error
                continue
            event = json.loads(line[6:])
            events += 1
            if "error" in event:
                reply.error = json.dumps(event["error"])
                continue
            for choice in event["choices"]:
                reply.text += choice["text"]
                reply.tokens += choice.get("token_ids") or []
        return events
