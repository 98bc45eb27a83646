"""One line per event, with fields, on stderr. Never a key; a prompt only where `--log-prompts` asks for it."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Literal

FIELDS = "fields"
NOISY = ("uvicorn", "uvicorn.error", "asyncio", "urllib3", "opentelemetry")
Form = Literal["text", "json"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def stamp(seconds: float) -> str:
    """A Unix time as `2026-01-01T00:00:00.000Z`."""
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What a record says besides its message, the id of the request it was logged for first."""
    given: Mapping[str, object] = record.__dict__.get(FIELDS, {})
    fields: dict[str, object] = {"id": request_id.get()}
    return {name: value for name, value in (fields | dict(given)).items() if value is not None}


class LineFormatter(logging.Formatter):
    """`2026-01-01T00:00:00.000Z info server.edge request id=... status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; a traceback, if any, is one JSON string at its end."""
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{stamp(record.created)} {record.levelname.lower()} {record.name} {message}"
        line += "".join(f" {name}={self._value(value)}" for name, value in fields_of(record).items())
        if record.exc_info:
            line += " traceback=" + json.dumps(self.formatException(record.exc_info))
        return line

    @staticmethod
    def _value(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.4g}"
        text = str(value)
        return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": "info", "logger": "server.edge", "message": "request", "id": ..., "status": 200}`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one JSON object on one line."""
        entry: dict[str, object] = {
            "time": stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | fields_of(record)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


FORMATTERS: dict[Form, type[logging.Formatter]] = {"text": LineFormatter, "json": JsonFormatter}


def configure(level: str, form: Form) -> None:
    """Installs the one handler of this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[form]())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def event(logger: logging.Logger, level: int, name: str, **fields: object) -> None:
    """Logs an event with its fields."""
    if logger.isEnabledFor(level):
        logger.log(level, name, extra={FIELDS: fields})
