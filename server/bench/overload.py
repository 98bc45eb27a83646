"""`lockstep bench overload`: find out what one server can do, then ask for a multiple of it.

Every round measures the capacity first (a closed loop that keeps every seat taken), then sends Poisson arrivals at a
multiple of it. What must hold: throughput stays, who is accepted is served in bounded time, the rest gets 429 at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.bench.client import Ask, Target, ask, introduce
from server.bench.console import ProgressLine, guarded, run_async
from server.bench.load import Amount, Level, Run, run
from server.bench.machine import Occasion
from server.bench.measure import spread, summarize
from server.bench.options import Parser, at_least, listed
from server.bench.prompts import KINDS, Prompts, TextPrompts
from server.bench.report import number, write_json
from server.bench.report import spread as shown
from server.bench.rounds import PROMPTS_PER_RUN
from server.bench.sample import Sample
from server.bench.servers import Command, serve_command, started

PROG = "lockstep bench overload"
REFUSED = 429
CAPACITY = "capacity"


@dataclass
class Seen:
    """What came of one load in all rounds. `rates` are answered requests per second, round by round."""

    label: str
    answered: list[Sample] = field(default_factory=list)
    refused: list[Sample] = field(default_factory=list)
    failed: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)

    def add(self, done: Run) -> None:
        """One round more."""
        answered = [sample for sample in done.samples if sample.error is None]
        self.answered += answered
        self.refused += [sample for sample in done.samples if sample.status == REFUSED]
        self.failed += [s for s in done.samples if s.error is not None and s.status != REFUSED]
        self.seconds += done.seconds
        self.rates.append(len(answered) / done.seconds)

    def figures(self, base: Seen) -> dict[str, Any]:
        """For the table and the JSON file. `held` is throughput relative to the capacity of the same round."""
        held = [rate / other for rate, other in zip(self.rates, base.rates, strict=True) if other]
        waits = [sample.retry_after for sample in self.refused if sample.retry_after is not None]
        return {
            "load": self.label,
            "answered": len(self.answered),
            "refused": len(self.refused),
            "failed": len(self.failed),
            "held": statistics.median(held) if held else None,
            "held_by_round": held,
            "refused_without_retry_after": len(self.refused) - len(waits),
            "retry_after_s": [min(waits), max(waits)] if waits else None,
            "refusal_ms": spread(sample.e2e for sample in self.refused),
            "summary": dataclasses.asdict(summarize(self.answered, seconds=self.seconds)) if self.answered else None,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The workload: seats and waiting places of the server, multiples of its capacity, seconds of every load."""

    seats: int
    queue: int
    factors: tuple[float, ...]
    seconds: float
    rounds: int
    prompts: Prompts
    ask: Ask


async def measure(target: Target, plan: Plan, say: Callable[[str], None]) -> list[Seen]:
    """Capacity first, then every factor, round by round."""
    found = [Seen(CAPACITY), *(Seen(f"{factor:g} x capacity") for factor in plan.factors)]
    async with target.client(600.0) as client:
        known = await introduce(client, target, plan.ask, plan.prompts(-1))
        full = Level(concurrency=plan.seats + plan.queue // 2)
        warm_up = asker(client, known, plan, say, "warm-up")
        await run(warm_up, full, Amount(requests=2 * plan.seats), first=-999, seed="")
        for each in range(plan.rounds):
            rate = 0.0
            for which, seen in enumerate(found):
                level = Level(rate=rate * plan.factors[which - 1]) if which else full
                first = (each * len(found) + which) * PROMPTS_PER_RUN
                one = asker(client, known, plan, say, f"round {each + 1}/{plan.rounds} {seen.label}")
                seen.add(await run(one, level, Amount(seconds=plan.seconds), first=first, seed=f"{first}"))
                rate = rate or seen.rates[-1]
    return found


def asker(
    client: httpx.AsyncClient, target: Target, plan: Plan, say: Callable[[str], None], where: str
) -> Callable[[int], Any]:
    """Asks, and says how far it got."""
    done = 0

    async def one(index: int) -> Sample:
        nonlocal done
        sample = await ask(client, target, plan.ask, plan.prompts(index), index)
        done += 1
        say(f"{where}: {done} requests")
        return sample

    return one


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = Parser(prog=PROG, description=__doc__, allow_abbrev=False)
    command.add_argument("--model-dir", default="", metavar="DIR", help="Default: the embedded model.")
    command.add_argument(
        "--factor", type=listed(at_least(0.1, float)), default=(2.0,), metavar="X,X", help="Of capacity. Default: 2."
    )
    for name, default, text in (
        ("seats", 8, "Requests computed at once."),
        ("queue", 8, "Requests that may wait."),
        ("rounds", 3, "Rounds."),
        ("output-tokens", 48, "Longest answer."),
    ):
        command.add_argument(
            f"--{name}", type=at_least(1), default=default, metavar="N", help=f"{text} Default: {default}."
        )
    command.add_argument(
        "--seconds", type=at_least(0.1, float), default=10.0, metavar="S", help="Of every load. Default: 10."
    )
    command.add_argument("--serve-arguments", default="", metavar="TEXT", help="More arguments for the server.")
    command.add_argument("--json", default="", metavar="FILE", help="Write the figures there as well.")
    command.add_argument(
        "--start-timeout", type=at_least(1, float), default=300.0, metavar="SECONDS", help="Default: 300."
    )
    return command


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per load."""
    lines = [
        "load             answered  refused  failed  req/s  tok/s   held"
        "   TTFT ms p50/p99     e2e ms p50/p99  429 ms p50/p99"
    ]
    for row in rows:
        summary = row["summary"] or {}
        held = "-" if row["held"] is None else f"{row['held']:.0%}"
        lines.append(
            f"{row['load']:<17}{row['answered']:>8}{row['refused']:>9}{row['failed']:>8}"
            f"{number(summary.get('requests_per_s')):>7}{number(summary.get('output_tokens_per_s')):>7}{held:>7}"
            f"{shown(summary.get('ttft_ms'), ('p50', 'p99')):>18}{shown(summary.get('e2e_ms'), ('p50', 'p99')):>19}"
            f"{shown(row['refusal_ms'], ('p50', 'p99')):>16}"
        )
    return "\n".join(lines) + "\n"


def verdict(rows: Sequence[dict[str, Any]], plan: Plan) -> str:
    """What the figures mean."""
    capacity = rows[0]["summary"]
    lines = ["held: answered requests per second, relative to the capacity of the same round (median)."]
    if capacity is not None and capacity["requests_per_s"]:
        before = plan.seats + plan.queue
        bound = 1e3 * (before + 1) / capacity["requests_per_s"]
        lines.append(f"Who is accepted finds at most {before} before it: about {bound:,.0f} ms of work.")
    waits = [row["retry_after_s"] for row in rows if row["retry_after_s"]]
    if waits:
        lines.append(f"Retry-After: {min(low for low, _ in waits)} to {max(high for _, high in waits)} s.")
    return "\n".join(lines) + "\n"


def run_command(arguments: list[str], command: Command) -> int:
    """The command behind the guard."""
    options = parser().parse_args(arguments)
    plan = Plan(
        seats=int(options.seats),
        queue=int(options.queue),
        factors=tuple(options.factor),
        seconds=float(options.seconds),
        rounds=int(options.rounds),
        prompts=TextPrompts(kinds=tuple(KINDS), seed=0, shared=0),
        ask=Ask(output_tokens=int(options.output_tokens)),
    )
    serve = [options.model_dir] if options.model_dir else []
    serve += ["--max-num-seqs", str(plan.seats), "--max-queued-requests", str(plan.queue)]
    serve += shlex.split(options.serve_arguments)
    occasion, say = Occasion("overload", arguments), ProgressLine()
    try:
        with started([("server", serve)], seconds=options.start_timeout, say=say, command=command) as (server,):
            found = run_async(measure(Target(label="server", url=server.url), plan, say))
    finally:
        say.clear()
    rows = [seen.figures(found[0]) for seen in found]
    sys.stdout.write(table(rows) + "\n" + verdict(rows, plan) + occasion.line())
    if options.json:
        write_json(options.json, occasion.header() | {"rows": rows})
    return 1 if any(row["failed"] or row["refused_without_retry_after"] or not row["answered"] for row in rows) else 0


def main(arguments: list[str], command: Command = serve_command) -> int:
    """The command. `command` makes a server's command line."""
    return guarded(PROG, lambda: run_command(arguments, command))
