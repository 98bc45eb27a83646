"""`lockstep bench stall`: some clients are being answered; then others come with long prompts.

For each setting of --max-prefill-tokens a server of its own, in turn: the waits between emissions without and with long
prompts. A step computes at most --max-num-batched-tokens tokens, so that is the most that lies between two emissions.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.bench.client import Ask, BenchError, Target, ask, introduce
from server.bench.console import ProgressLine, guarded, run_async
from server.bench.load import Amount, closed_loop
from server.bench.machine import Occasion
from server.bench.measure import spread
from server.bench.options import Parser, at_least, listed
from server.bench.prompts import IdPrompts
from server.bench.report import spread as shown
from server.bench.report import write_json
from server.bench.sample import Sample
from server.bench.servers import Command, serve_command, started

PROG = "lockstep bench stall"
LOADS = ("alone", "long prompts")
SHORT = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`clients` streams of `output` tokens each; one client that sends prompts of `long` tokens, one after another."""

    clients: int
    output: int
    long: int
    vocab: int
    seconds: float
    rounds: int


@dataclass
class Seen:
    """Samples of the streams and of the long prompts, of all rounds."""

    streams: list[Sample] = field(default_factory=list)
    long: list[Sample] = field(default_factory=list)

    def figures(self, setting: str, load: str) -> dict[str, Any]:
        """For the table and the JSON file."""
        return {
            "max_prefill_tokens": setting,
            "load": load,
            "streams": len(self.streams),
            "long_prompts": len(self.long),
            "gap_ms": spread(gap for sample in self.streams for gap in sample.gaps()),
            "long_ttft_ms": spread(sample.ttft for sample in self.long if sample.ttft is not None),
        }


class Clients:
    """Those who ask one server."""

    def __init__(self, client: httpx.AsyncClient, target: Target, plan: Plan) -> None:
        self._client = client
        self._target = target
        self._plan = plan

    async def streams(self, first: int) -> list[Sample]:
        """Short prompts, long answers."""
        what = Ask(output_tokens=self._plan.output, chat=False, ignore_eos=True)
        prompts = IdPrompts(length=SHORT, vocab=self._plan.vocab, seed=1)
        return await self._loop(what, prompts, self._plan.clients, first)

    async def long(self, first: int) -> list[Sample]:
        """Long prompts, one token."""
        what = Ask(output_tokens=1, chat=False, ignore_eos=True)
        prompts = IdPrompts(length=self._plan.long, vocab=self._plan.vocab, seed=2)
        return await self._loop(what, prompts, 1, first)

    async def _loop(self, what: Ask, prompts: IdPrompts, clients: int, first: int) -> list[Sample]:
        async def one(index: int) -> Sample:
            sample = await ask(self._client, self._target, what, prompts(index), index)
            if sample.error is not None:
                raise BenchError(f"the server {self._target.label} failed: {sample.error}.")
            return sample

        return await closed_loop(one, clients, Amount(seconds=self._plan.seconds), first)


async def measure(targets: Sequence[Target], plan: Plan, say: Callable[[str], None]) -> dict[tuple[str, str], Seen]:
    """(setting, load) -> what was seen."""
    found = {(target.label, load): Seen() for target in targets for load in LOADS}
    for number in range(plan.rounds):
        for target in targets:
            async with target.client(600.0) as http:
                short = IdPrompts(length=SHORT, vocab=plan.vocab)
                known = await introduce(http, target, Ask(output_tokens=2, chat=False), short(-1 - number))
                clients, first = Clients(http, known, plan), int(time.time()) * 1000
                say(f"round {number + 1}/{plan.rounds} --max-prefill-tokens {target.label}: alone")
                found[target.label, LOADS[0]].streams += await clients.streams(first)
                say(f"round {number + 1}/{plan.rounds} --max-prefill-tokens {target.label}: long prompts")
                streams, long = await asyncio.gather(clients.streams(first + 500), clients.long(first))
                found[target.label, LOADS[1]].streams += streams
                found[target.label, LOADS[1]].long += long
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = Parser(prog=PROG, description=__doc__, allow_abbrev=False)
    command.add_argument("--model-dir", default="", metavar="DIR", help="Default: the embedded model.")
    command.add_argument(
        "--max-prefill-tokens",
        type=listed(at_least(0)),
        default=(0, 64),
        metavar="N,N",
        help="Settings. Default: 0,64.",
    )
    for name, default, text in (
        ("clients", 4, "Streams at a time."),
        ("output-tokens", 64, "Tokens of a stream."),
        ("long", 1500, "Tokens of a long prompt."),
        ("vocab", 1000, "Prompts are token ids below this."),
        ("rounds", 3, "Rounds."),
    ):
        command.add_argument(
            f"--{name}", type=at_least(1), default=default, metavar="N", help=f"{text} Default: {default}."
        )
    command.add_argument(
        "--seconds", type=at_least(0.1, float), default=5.0, metavar="S", help="Of every load. Default: 5."
    )
    command.add_argument("--serve-arguments", default="", metavar="TEXT", help="More arguments for every server.")
    command.add_argument("--json", default="", metavar="FILE", help="Write the figures there as well.")
    command.add_argument(
        "--start-timeout", type=at_least(1, float), default=300.0, metavar="SECONDS", help="Default: 300."
    )
    return command


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each setting and load."""
    lines = ["max-prefill-tokens  load          streams  long  gap ms p50/p99/max        long TTFT ms p50/p99"]
    for row in rows:
        lines.append(
            f"{row['max_prefill_tokens']:<20}{row['load']:<14}{row['streams']:>7}{row['long_prompts']:>6}  "
            f"{shown(row['gap_ms'], ('p50', 'p99', 'max')):<26}{shown(row['long_ttft_ms'], ('p50', 'p99'))}"
        )
    return "\n".join(lines) + "\ngap: the wait between two emissions of one stream.\n"


def run_command(arguments: list[str], command: Command) -> int:
    """The command behind the guard."""
    options = parser().parse_args(arguments)
    plan = Plan(
        clients=int(options.clients),
        output=int(options.output_tokens),
        long=int(options.long),
        vocab=int(options.vocab),
        seconds=float(options.seconds),
        rounds=int(options.rounds),
    )
    settings = [str(int(setting)) for setting in dict.fromkeys(options.max_prefill_tokens)]
    common = [options.model_dir] if options.model_dir else []
    common += ["--prefix-cache", "off", *shlex.split(options.serve_arguments)]
    servers = [(setting, [*common, "--max-prefill-tokens", setting]) for setting in settings]
    occasion, say = Occasion("stall", arguments), ProgressLine()
    try:
        with started(servers, seconds=options.start_timeout, say=say, command=command) as running:
            targets = [Target(label=each.label, url=each.url) for each in running]
            found = run_async(measure(targets, plan, say))
    finally:
        say.clear()
    rows = [seen.figures(setting, load) for (setting, load), seen in found.items()]
    sys.stdout.write(table(rows) + occasion.line())
    if options.json:
        write_json(options.json, occasion.header() | {"rows": rows})
    return 0


def main(arguments: list[str], command: Command = serve_command) -> int:
    """The command. `command` makes a server's command line."""
    return guarded(PROG, lambda: run_command(arguments, command))
