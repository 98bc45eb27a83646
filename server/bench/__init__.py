"""`lockstep bench`: measures servers from outside, over HTTP. Knows nothing of the engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

# name -> (module:attribute called with the remaining arguments and returning the exit code, one line of help)
BENCHES: dict[str, tuple[str, str]] = {
    "overload": ("server.bench.overload:main", "more requests than the server can answer: what it does with them"),
    "prefix": ("server.bench.prefix:main", "the same server with and without the prefix cache, side by side"),
    "serve": ("server.bench.serve:main", "load any OpenAI-compatible servers and compare them"),
    "stall": ("server.bench.stall:main", "what long prompts do to the pace of those who are being answered"),
    "speculation": ("server.bench.speculation:main", "the same server with and without speculation, side by side"),
}


def usage() -> str:
    """The overview."""
    lines = [f"  {name:<13}{text}" for name, (_, text) in BENCHES.items()]
    return "usage: lockstep bench BENCH ...\n\n" + "\n".join(lines) + "\n\n`lockstep bench BENCH --help` says more.\n"


def main(arguments: list[str]) -> int:
    """Runs one benchmark."""
    if not arguments or arguments[0] in ("-h", "--help"):
        (sys.stdout if arguments else sys.stderr).write(usage())
        return 0 if arguments else 2
    if arguments[0] not in BENCHES:
        sys.stderr.write(f"lockstep bench: there is no benchmark {arguments[0][:64]!r} (see lockstep bench --help)\n")
        return 2
    module, _, name = BENCHES[arguments[0]][0].partition(":")
    command: Callable[[list[str]], int] = vars(importlib.import_module(module))[name]
    return command(arguments[1:])
