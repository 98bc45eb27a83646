"""`lockstep bench prefix`: two servers, with and without the prefix cache, and the same conversations for both.

Three workloads: `chat` (each turn is the text so far and more), `shared` (one long system prompt, questions of their
own) and `distinct` (nothing in common: what the cache costs where it cannot help). The servers take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from server.bench.client import AnswerError, BenchError, Reader, Target, model_of, stream
from server.bench.console import ProgressLine, guarded, run_async
from server.bench.machine import Occasion
from server.bench.options import Parser, at_least
from server.bench.servers import Command, serve_command, started

PROG = "lockstep bench prefix"
WORKLOADS = ("chat", "shared", "distinct")
SETTINGS = (("on", "on"), ("off", "off"))
WORDS = (
    "river",
    "market",
    "window",
    "garden",
    "letter",
    "station",
    "summer",
    "winter",
    "bridge",
    "music",
    "paper",
    "yellow",
    "silver",
    "quiet",
    "early",
    "gentle",
    "travel",
    "answer",
    "morning",
    "evening",
    "mountain",
    "harbour",
    "painter",
    "doctor",
    "village",
    "orange",
    "copper",
    "lantern",
)
Messages = list[dict[str, str]]


@dataclass(slots=True)
class Seen:
    """What one server said in one workload: times to the first token in seconds, tokens, and the answers."""

    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    answers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """`conversations` at once, of `turns` turns; `words` in a question, `shared_words` in the common system prompt."""

    conversations: int
    turns: int
    words: int
    shared_words: int
    output_tokens: int


def text(chance: random.Random, words: int) -> str:
    """Words in a random order."""
    return " ".join(chance.choice(WORDS) for _ in range(words))


def opening(workload: str, load: Load, chance: random.Random, seed: int) -> Messages:
    """A conversation's first messages."""
    if workload == "chat":
        return []
    own = random.Random(f"{seed} common") if workload == "shared" else chance
    return [{"role": "system", "content": text(own, load.shared_words)}]


async def converse(client: httpx.AsyncClient, target: Target, workload: str, load: Load, name: str, seed: int) -> Seen:
    """One conversation, turn by turn; but for a chat, every turn begins a new one."""
    chance = random.Random(f"{seed} {workload} {name}")
    messages: Messages = []
    seen = Seen()
    for turn in range(load.turns):
        if turn == 0 or workload != "chat":
            messages = opening(workload, load, chance, seed)
        messages.append({"role": "user", "content": text(chance, load.words)})
        body = {
            "model": target.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": load.output_tokens,
            "ignore_eos": True,
        }
        reader, began = Reader(), time.perf_counter()
        try:
            await stream(client, "/v1/chat/completions", body, reader)
        except AnswerError as error:
            raise BenchError(f"the server {target.label} failed: {error}.") from error
        seen.ttft.append(reader.emissions[0].at - began)
        seen.prompt_tokens += reader.usage["prompt_tokens"]
        seen.cached_tokens += reader.usage["prompt_tokens_details"]["cached_tokens"]
        seen.answers[f"{name}.{turn}"] = "".join(reader.text)
        messages.append({"role": "assistant", "content": "".join(reader.text)})
    return seen


async def measure_once(client: httpx.AsyncClient, target: Target, workload: str, load: Load, seed: int) -> Seen:
    """All conversations of a workload, at once."""
    total, began = Seen(), time.perf_counter()
    names = [str(number) for number in range(load.conversations)]
    for seen in await asyncio.gather(*(converse(client, target, workload, load, name, seed) for name in names)):
        total.ttft += seen.ttft
        total.prompt_tokens += seen.prompt_tokens
        total.cached_tokens += seen.cached_tokens
        total.answers |= seen.answers
    total.seconds = time.perf_counter() - began
    return total


async def measure(targets: Sequence[Target], load: Load, rounds: int, say: ProgressLine) -> dict[str, dict[str, Seen]]:
    """Workload -> label -> what was seen in all rounds; who goes first changes with every round."""
    found = {workload: {target.label: Seen() for target in targets} for workload in WORKLOADS}
    clients = {target.label: target.client(600.0) for target in targets}
    try:
        models = {target.label: await model_of(clients[target.label], target) for target in targets}
        named = [Target(label=each.label, url=each.url, model=models[each.label]) for each in targets]
        for target in named:  # allocations and first calls are nobody's fault
            await measure_once(clients[target.label], target, "distinct", load, -1)
        for number in range(rounds):
            order = named if number % 2 == 0 else named[::-1]
            for workload in WORKLOADS:
                for target in order:
                    say(f"round {number + 1} of {rounds}: {workload}, cache {target.label}")
                    seen = await measure_once(clients[target.label], target, workload, load, number)
                    total = found[workload][target.label]
                    total.ttft += seen.ttft
                    total.prompt_tokens += seen.prompt_tokens
                    total.cached_tokens += seen.cached_tokens
                    total.seconds += seen.seconds
                    total.answers |= {f"{number}.{name}": said for name, said in seen.answers.items()}
    finally:
        for client in clients.values():
            await client.aclose()
    return found


def table(found: dict[str, dict[str, Seen]]) -> str:
    """One line for each workload and server."""
    lines = ["workload   cache   TTFT p50   TTFT mean   prompt tokens   cached   computed   total"]
    for workload, by_label in found.items():
        for label, seen in by_label.items():
            p50, mean = statistics.median(seen.ttft) * 1e3, statistics.fmean(seen.ttft) * 1e3
            computed = seen.prompt_tokens - seen.cached_tokens
            lines.append(
                f"{workload:<11}{label:<7}{p50:>7.1f} ms{mean:>9.1f} ms{seen.prompt_tokens:>16}{seen.cached_tokens:>9}"
                f"{computed:>11}{seen.seconds:>6.2f} s"
            )
    return "\n".join(lines) + "\n"


def different(found: dict[str, dict[str, Seen]]) -> list[str]:
    """Answers that are not the same with and without the cache."""
    out = []
    for workload, by_label in found.items():
        base, *others = by_label.values()
        out += [
            f"{workload} {name}" for name in base.answers for each in others if each.answers[name] != base.answers[name]
        ]
    return out


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = Parser(prog=PROG, description=__doc__, allow_abbrev=False)
    command.add_argument("--model-dir", default="", metavar="DIR", help="Default: the embedded model.")
    for name, default, text_ in (
        ("conversations", 4, "Conversations at once."),
        ("turns", 8, "Turns of a chat."),
        ("words", 12, "Words of a question."),
        ("shared-words", 200, "Words of a system prompt."),
        ("output-tokens", 16, "Tokens of an answer."),
        ("rounds", 3, "Rounds."),
    ):
        command.add_argument(
            f"--{name}", type=at_least(1), default=default, metavar="N", help=f"{text_} Default: {default}."
        )
    command.add_argument("--serve-arguments", default="", metavar="TEXT", help="More arguments for both servers.")
    command.add_argument("--json", default="", metavar="FILE", help="Write the figures there as well.")
    command.add_argument(
        "--start-timeout", type=at_least(1, float), default=300.0, metavar="SECONDS", help="Default: 300."
    )
    return command


def run(arguments: list[str], command: Command) -> int:
    """The command behind the guard."""
    options = parser().parse_args(arguments)
    load = Load(
        int(options.conversations),
        int(options.turns),
        int(options.words),
        int(options.shared_words),
        int(options.output_tokens),
    )
    common = ([options.model_dir] if options.model_dir else []) + shlex.split(options.serve_arguments)
    servers = [(label, [*common, "--prefix-cache", value]) for label, value in SETTINGS]
    occasion, say = Occasion("prefix", arguments), ProgressLine()
    try:
        with started(servers, seconds=options.start_timeout, say=say, command=command) as running:
            targets = [Target(label=each.label, url=each.url) for each in running]
            found = run_async(measure(targets, load, int(options.rounds), say))
    finally:
        say.clear()
    wrong = different(found)
    sys.stdout.write(table(found))
    sys.stdout.write(f"answers that differ: {', '.join(wrong) or 'none'}\n" + occasion.line())
    if options.json:
        rows: dict[str, Any] = {
            workload: {label: asdict(seen) | {"answers": len(seen.answers)} for label, seen in by_label.items()}
            for workload, by_label in found.items()
        }
        Path(options.json).write_text(json.dumps(occasion.header() | {"found": rows}, indent=1), encoding="utf-8")
    return 1 if wrong else 0


def main(arguments: list[str], command: Command = serve_command) -> int:
    """The command. `command` makes a server's command line."""
    return guarded(PROG, lambda: run(arguments, command))
