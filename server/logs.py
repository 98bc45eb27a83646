"""One line per event, with fields, on stderr. Never a prompt, never an answer, never a key."""

from __future__ import annotations

import datetime
import json
import logging
import sys

FIELDS = "fields"


class LineFormatter(logging.Formatter):
    """`2026-01-01T00:00:00.000Z info server.app request id=... status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; a traceback, if any, is one JSON string at its end."""
        time = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(record.msecs):03d}Z"
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{stamp} {record.levelname.lower()} {record.name} {message}"
        fields = record.__dict__.get(FIELDS)
        if fields:
            line += "".join(f" {name}={self._value(value)}" for name, value in fields.items() if value is not None)
        if record.exc_info:
            line += " traceback=" + json.dumps(self.formatException(record.exc_info))
        return line

    @staticmethod
    def _value(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.4g}"
        text = str(value)
        return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


def configure(level: str) -> None:
    """Installs the one handler of this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def event(logger: logging.Logger, level: int, name: str, **fields: object) -> None:
    """Logs an event with its fields."""
    if logger.isEnabledFor(level):
        logger.log(level, name, extra={FIELDS: fields})
