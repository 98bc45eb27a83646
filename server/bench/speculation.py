"""`lockstep bench speculation`: one server per drafting setting, the same prompts for each, in one interleaved run."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence

from server.bench.client import Ask, BenchError, Target
from server.bench.console import ProgressLine, guarded, run_async
from server.bench.load import Amount, Level
from server.bench.machine import Occasion
from server.bench.options import Parser, add_common, at_least
from server.bench.prompts import KINDS, TextPrompts
from server.bench.report import SPECULATION_COLUMNS, definitions, document, equality_lines, notes, table, write_json
from server.bench.rounds import Plan, compare_answers, measure
from server.bench.serve import exit_code
from server.bench.servers import Command, ServerProcess, serve_command, started

PROG = "lockstep bench speculation"
SETTINGS = ("none", "mtp:3", "ngram:4")
CONCURRENCY = (1, 4, 16)
SECONDS = 2.5
DEFINED = ("percentile", "TTFT", "ITL", "output tokens/s", "ratio", "acceptance", "tokens per verification")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = Parser(
        prog=PROG,
        description="Start one server per setting and measure them in turn on the same greedy prompts, one under load "
        "at a time. The answers must be the same for all of them.",
        allow_abbrev=False,
    )
    command.add_argument("--model-dir", default="", metavar="DIR", help="Default: the embedded model.")
    command.add_argument(
        "--speculative",
        action="append",
        metavar="SETTING",
        help=f"A setting; may be repeated, the first is the base. Default: {' '.join(SETTINGS)}.",
    )
    add_common(command, concurrency="1,4,16", rounds="3")
    command.add_argument(
        "--seconds",
        type=at_least(0.001, float),
        metavar="S",
        help="Time in which the base's requests begin in a run of the first round; all other runs repeat that number."
        f" Default: {SECONDS:g}.",
    )
    command.add_argument("--threads", type=at_least(1), metavar="N", help="Compute threads of each server.")
    command.add_argument("--serve-arguments", default="", metavar="TEXT", help="More arguments for every server.")
    command.add_argument(
        "--start-timeout", type=at_least(1, float), default=300.0, metavar="SECONDS", help="Default: 300."
    )
    return command


def plan_of(options: argparse.Namespace) -> Plan:
    """The workload."""
    if options.requests and options.seconds:
        raise BenchError("--requests and --seconds exclude each other.")
    return Plan(
        levels=tuple(Level(concurrency=int(number)) for number in options.concurrency or CONCURRENCY),
        amount=Amount(requests=options.requests) if options.requests else Amount(seconds=options.seconds or SECONDS),
        rounds=options.rounds or 3,
        warmup=16 if options.warmup is None else options.warmup,
        prompts=TextPrompts(kinds=options.kinds or tuple(KINDS), seed=options.seed, shared=options.shared_prefix),
        ask=Ask(output_tokens=options.output_tokens),
        seed=options.seed,
        timeout=options.timeout,
    )


def servers_of(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Labels, and arguments of `lockstep serve`."""
    common = [options.model_dir] if options.model_dir else []
    common += ["--threads", str(options.threads)] if options.threads else []
    common += shlex.split(options.serve_arguments)
    settings = options.speculative or list(SETTINGS)
    labels = [
        setting if setting not in settings[:number] else f"{setting} ({settings[:number].count(setting) + 1})"
        for number, setting in enumerate(settings)
    ]
    return [(label, [*common, "--speculative", setting]) for label, setting in zip(labels, settings, strict=True)]


def targets_of(servers: Sequence[ServerProcess]) -> list[Target]:
    """The servers as targets."""
    return [Target(label=server.label, url=server.url) for server in servers]


def leave(*_: object) -> None:
    """SIGTERM ends this command the way Ctrl-C does, servers and all."""
    signal.raise_signal(signal.SIGINT)


def run(arguments: list[str], command: Command) -> int:
    """The command behind the guard."""
    options = parser().parse_args(arguments)
    plan, servers = plan_of(options), servers_of(options)
    occasion = Occasion("speculation", arguments)
    say = ProgressLine()
    before = signal.signal(signal.SIGTERM, leave)
    try:
        with started(servers, seconds=options.start_timeout, say=say, command=command) as running:
            start_lines = {server.label: server.start_line for server in running}
            targets, rows = run_async(measure(targets_of(running), plan, say))
    finally:
        say.clear()
        signal.signal(signal.SIGTERM, before)
    equality = compare_answers(rows)
    if options.json:
        header = occasion.header() | {"servers": start_lines}
        write_json(options.json, document(header, targets, plan, rows, equality))
    sys.stdout.write(table(rows, SPECULATION_COLUMNS))
    sys.stdout.write("\n" + equality_lines(equality) + "\n" + notes(rows) + definitions(DEFINED) + occasion.line())
    return 1 if equality.differences else exit_code(rows)


def main(arguments: list[str], command: Command = serve_command) -> int:
    """The command. `command` makes a server's command line."""
    return guarded(PROG, lambda: run(arguments, command))
