"""`python -m tests.soak`: see `--help`. Exit code 1 when something was not as it must be."""

from __future__ import annotations

import argparse
import sys

from server.bench.console import ProgressLine
from tests.soak.run import WAYS, Report, soak
from tests.soak.work import answered, make_items


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__, allow_abbrev=False)
    command.add_argument("--minutes", type=float, default=5.0, help="Time under load, shared by the ways. Default: 5.")
    command.add_argument("--prompts", type=int, default=120, help="Different prompts. Default: 120.")
    command.add_argument("--seed", type=int, default=0, help="Of prompts and load. Default: 0.")
    command.add_argument("--way", choices=tuple(WAYS), action="append", help="May be repeated. Default: all.")
    return command


def write(report: Report) -> None:
    """The result for people."""
    counts = ", ".join(f"{count} {name}" for name, count in sorted(report.counts.items()))
    sys.stdout.write(f"{report.way}: {counts} in {report.seconds:.0f} s\n")
    for fact in report.facts:
        sys.stdout.write(f"  {fact}\n")
    for failure in report.failures[:20]:
        sys.stdout.write(f"  FAILED {failure}\n")
    if len(report.failures) > 20:
        sys.stdout.write(f"  ... and {len(report.failures) - 20} more\n")


def main(arguments: list[str]) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    ways = options.way or list(WAYS)
    say = ProgressLine()
    sys.stderr.write(f"answers of {options.prompts} prompts, one by one\n")
    items = answered(make_items(options.prompts, options.seed))
    failed = 0
    for way in ways:
        report = soak(way, 60.0 * options.minutes / len(ways), items, seed=options.seed, say=say)
        say.clear()
        write(report)
        failed += len(report.failures)
    sys.stdout.write("soak: passed\n" if not failed else f"soak: {failed} failures\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
