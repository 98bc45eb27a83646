"""The arguments both benchmarks have, and the types of their values."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from server.bench.measure import SLOS
from server.bench.prompts import KINDS


class Parser(argparse.ArgumentParser):
    """Errors are one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)


def at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """An argument type: a number that is not too small."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value < 1e12:
            raise argparse.ArgumentTypeError(f"must be {'an integer' if kind is int else 'a number'} >= {least:g}")
        return value

    return parse


def listed(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """An argument type: numbers with commas between."""

    def parse(text: str) -> tuple[float, ...]:
        return tuple(kind(part.strip()) for part in text.split(","))

    return parse


def slo_table(text: str) -> dict[str, float]:
    """`ttft:500,itl:50` in milliseconds, as seconds."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        if name not in SLOS:
            raise argparse.ArgumentTypeError(f"must be NAME:MILLISECONDS with a name of {', '.join(SLOS)}")
        limits[name] = at_least(0, float)(value) / 1e3
    return limits


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def kind_names(text: str) -> tuple[str, ...]:
    """Names of prompt kinds."""
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"knows no {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
    return names


def add_common(command: argparse.ArgumentParser, *, concurrency: str, rounds: str) -> None:
    """The arguments both benchmarks have."""
    count, some = at_least(1), at_least(0)
    command.add_argument(
        "--concurrency", type=listed(count), metavar="N,N", help=f"Clients in a closed loop. Default: {concurrency}."
    )
    command.add_argument("--requests", type=count, metavar="N", help="Requests per run, instead of --seconds.")
    command.add_argument("--rounds", type=count, metavar="N", help=f"Rounds, each target in turn. Default: {rounds}.")
    command.add_argument("--warmup", type=some, metavar="N", help="Requests to each target before, not counted.")
    command.add_argument(
        "--output-tokens", type=count, metavar="N", default=128, help="Longest answer. Default: %(default)s."
    )
    command.add_argument(
        "--kinds", type=kind_names, metavar="KIND,..", help=f"Kinds of text prompts. Default: {','.join(KINDS)}."
    )
    command.add_argument("--shared-prefix", type=some, default=0, metavar="N", help="Tokens (words) all prompts share.")
    command.add_argument("--seed", type=some, default=0, metavar="N", help="Of prompts and arrivals. Default: 0.")
    command.add_argument(
        "--timeout", type=at_least(0.1, float), default=600.0, metavar="SECONDS", help="Longest silence of a server."
    )
    command.add_argument("--json", metavar="FILE", help="Write everything, every request too, to this file.")
