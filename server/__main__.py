"""The command `lockstep`: picks a subcommand by name and imports nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

# name -> (module:attribute called with the remaining arguments and returning the exit code, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("server.serve:main", "serve a model over the OpenAI API"),
    "fetch": ("server.fetch:main", "download a model over HTTP and check its files"),
    "bench": ("server.bench:main", "measure a running server or the engine"),
    "support": ("server.support:main", "print what the engine can run: families, proposers, devices"),
}


def usage() -> str:
    """The overview."""
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    return "usage: lockstep COMMAND ...\n\n" + "\n".join(lines) + "\n\n`lockstep COMMAND --help` says more.\n"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        (sys.stdout if given else sys.stderr).write(usage())
        return 0 if given else 2
    if given[0] == "--version":
        from server.meter import package_version

        sys.stdout.write(f"lockstep {package_version()}\n")
        return 0
    if given[0] not in COMMANDS:
        sys.stderr.write(f"lockstep: there is no command {given[0][:64]!r} (see lockstep --help)\n")
        return 2
    module, _, name = COMMANDS[given[0]][0].partition(":")
    command: Callable[[list[str]], int] = vars(importlib.import_module(module))[name]
    return command(given[1:])


if __name__ == "__main__":
    sys.exit(main())
