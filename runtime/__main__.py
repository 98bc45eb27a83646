"""`python -m runtime worker --fd N`: the engine process. Started by the server; not meant to be typed."""

from __future__ import annotations

import argparse
import sys

from runtime import worker


def main() -> int:
    """Dispatches the engine's own commands."""
    parser = argparse.ArgumentParser(prog="python -m runtime")
    commands = parser.add_subparsers(dest="command", required=True)
    work = commands.add_parser("worker", help="serve one front end over a socket")
    work.add_argument("--fd", type=int, required=True, help="an inherited, connected socket")
    commands.add_parser("support", help="print what works with what", add_help=False)
    arguments, rest = parser.parse_known_args()
    if arguments.command == "support":
        from runtime import support

        return support.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return worker.main(arguments.fd)


if __name__ == "__main__":
    sys.exit(main())
