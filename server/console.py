"""What the command says on stdout to whoever started it: sentences for people, or JSON objects for machines."""

from __future__ import annotations

import json
import sys
import time

from server.logs import Form, stamp


class Console:
    """Says one line at once: `text`, or `name` with `fields`, which say the same."""

    def __init__(self, form: Form) -> None:
        self._form = form

    def say(self, name: str, text: str, **fields: object) -> None:
        """One line."""
        line = f"lockstep: {text}"
        if self._form == "json":
            entry = {"time": stamp(time.time()), "level": "info", "logger": "server.serve", "message": name}
            line = json.dumps(entry | fields)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
