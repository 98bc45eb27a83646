"""What both benchmarks do with a terminal: the progress line, exit codes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, TextIO, TypeVar

import uvloop

from server.bench.client import BenchError

INTERRUPTED = 130
Result = TypeVar("Result")


class ProgressLine:
    """One line on stderr that is written over; a line per text where stderr is no terminal, and not too many."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._said = 0.0
        self._width = 0

    def __call__(self, text: str) -> None:
        """Says how far the run is."""
        now = time.monotonic()
        if now - self._said < (0.1 if self._terminal else 5.0):
            return
        self._said = now
        if self._terminal:
            self._stream.write("\r" + text[:100].ljust(self._width))
            self._width = min(len(text), 100)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Nothing is in progress any more."""
        if self._terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine on the fast loop; Ctrl-C cancels it and comes out as KeyboardInterrupt."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def guarded(prog: str, command: Callable[[], int]) -> int:
    """Runs a command; what cannot work is one sentence and exit code 2, Ctrl-C is 130."""
    try:
        return command()
    except BenchError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        return INTERRUPTED
