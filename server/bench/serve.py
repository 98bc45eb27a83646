"""`lockstep bench serve`: load on OpenAI-compatible servers that run already."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import httpx

from server.bench.client import Ask, BenchError, Target
from server.bench.console import ProgressLine, guarded, run_async
from server.bench.load import Amount, Level
from server.bench.machine import Occasion
from server.bench.measure import SLOS
from server.bench.options import Parser, add_common, at_least, json_object, listed, slo_table
from server.bench.prompts import KINDS, IdPrompts, Prompts, TextPrompts
from server.bench.report import RATIO_COLUMNS, SERVE_COLUMNS, definitions, document, notes, table, write_json
from server.bench.rounds import Plan, Row, measure

PROG = "lockstep bench serve"
DEFINED = ("percentile", "TTFT", "ITL", "TPOT", "e2e", "output tokens/s")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = Parser(
        prog=PROG,
        description="Load OpenAI-compatible servers. Several --url are loaded in turn, round by round, and compared.",
        allow_abbrev=False,
    )
    command.add_argument("--url", action="append", required=True, metavar="URL", help="A server; may be repeated.")
    command.add_argument("--label", action="append", default=[], metavar="NAME", help="Its name, in the same order.")
    command.add_argument("--model", default="", help="Name in the requests. Default: the first the server lists.")
    command.add_argument("--api-key", default="", metavar="KEY", help="Bearer key.")
    add_common(command, concurrency="1", rounds="1, or 3 for several servers")
    rates = listed(at_least(1e-6, float))
    command.add_argument("--rate", type=rates, metavar="R,R", help="Poisson arrivals per second, not a closed loop.")
    command.add_argument(
        "--seconds",
        type=at_least(0.001, float),
        metavar="S",
        help="Time in which requests begin, per run. Default: 10.",
    )
    command.add_argument(
        "--prompt-tokens", type=at_least(1), metavar="N", help="Prompts are N random token ids, not texts."
    )
    command.add_argument("--vocab", type=at_least(2), default=1000, metavar="V", help="Ids are below V. Default: 1000.")
    command.add_argument("--endpoint", choices=("chat", "completions"), help="Default: chat for texts.")
    command.add_argument("--ignore-eos", action="store_true", help="Go on until --output-tokens.")
    command.add_argument("--temperature", type=at_least(0, float), default=0.0, metavar="T", help="Default: 0.")
    command.add_argument("--body", type=json_object, default={}, metavar="JSON", help="More fields for every request.")
    command.add_argument(
        "--slo", type=slo_table, default={}, metavar="NAME:MS,..", help=f"Limits for goodput: {', '.join(SLOS)}."
    )
    return command


def targets_of(options: argparse.Namespace) -> list[Target]:
    """The servers, each with a label of its own."""
    if len(options.label) > len(options.url):
        raise BenchError("there are more --label than --url.")
    found: list[Target] = []
    for number, given in enumerate(options.url):
        url = given.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise BenchError(f"--url must begin with http:// or https:// (got {given[:64]!r}).")
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise BenchError(f"--url {given[:64]!r} is not an address ({error}).") from error
        label = options.label[number] if number < len(options.label) else url.partition("://")[2]
        found.append(Target(label=label, url=url, api_key=options.api_key, model=options.model))
    return [distinct(target, found[:number]) for number, target in enumerate(found)]


def distinct(target: Target, earlier: Sequence[Target]) -> Target:
    """With a number at the label where it is taken: the same server twice shows the noise."""
    same = sum(other.label == target.label for other in earlier)
    if not same:
        return target
    return Target(label=f"{target.label} ({same + 1})", url=target.url, api_key=target.api_key, model=target.model)


def default_warmup(levels: Sequence[Level]) -> int:
    """Enough to open the connections and to be past what only first requests pay."""
    return min(max(2, *(level.concurrency for level in levels)), 16)


def plan_of(options: argparse.Namespace) -> Plan:
    """The workload."""
    if options.rate and options.concurrency:
        raise BenchError("--rate and --concurrency exclude each other.")
    if options.requests and options.seconds:
        raise BenchError("--requests and --seconds exclude each other.")
    ids = options.prompt_tokens is not None
    if ids and options.endpoint == "chat":
        raise BenchError("token ids go to --endpoint completions only.")
    if ids and options.kinds:
        raise BenchError("--prompt-tokens and --kinds exclude each other.")
    prompts: Prompts
    if ids:
        shared = options.shared_prefix
        prompts = IdPrompts(length=options.prompt_tokens, vocab=options.vocab, seed=options.seed, shared=shared)
    else:
        prompts = TextPrompts(kinds=options.kinds or tuple(KINDS), seed=options.seed, shared=options.shared_prefix)
    if options.rate:
        levels = tuple(Level(rate=rate) for rate in options.rate)
    else:
        levels = tuple(Level(concurrency=int(number)) for number in options.concurrency or (1,))
    return Plan(
        levels=levels,
        amount=Amount(requests=options.requests) if options.requests else Amount(seconds=options.seconds or 10.0),
        rounds=options.rounds or (3 if len(options.url) > 1 else 1),
        warmup=default_warmup(levels) if options.warmup is None else options.warmup,
        prompts=prompts,
        ask=Ask(
            output_tokens=options.output_tokens,
            chat=not ids and options.endpoint != "completions",
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            fields=options.body,
        ),
        seed=options.seed,
        timeout=options.timeout,
        slo=options.slo,
    )


def exit_code(rows: Sequence[Row]) -> int:
    """1 when a row has no answer at all."""
    return 0 if all(row.whole.succeeded for row in rows) else 1


def run(arguments: list[str]) -> int:
    """The command behind the guard."""
    options = parser().parse_args(arguments)
    targets, plan = targets_of(options), plan_of(options)
    occasion = Occasion("serve", arguments)
    say = ProgressLine()
    try:
        targets, rows = run_async(measure(targets, plan, say))
    finally:
        say.clear()
    if options.json:
        write_json(options.json, document(occasion.header(), targets, plan, rows, None))
    defined = [*DEFINED, *(["goodput"] if plan.slo else [])]
    sys.stdout.write(table(rows, SERVE_COLUMNS))
    if len(targets) > 1:
        compared = [row for row in rows if row.target.label != targets[0].label]
        sys.stdout.write(f"\nratios to {targets[0].label}, median (min..max) of {plan.rounds} rounds\n")
        sys.stdout.write(table(compared, RATIO_COLUMNS))
    sys.stdout.write("\n" + notes(rows) + definitions(defined) + occasion.line())
    return exit_code(rows)


def main(arguments: list[str]) -> int:
    """The command."""
    return guarded(PROG, lambda: run(arguments))
