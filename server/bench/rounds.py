"""The interleaved run: round by round and level by level, every target in turn, one under load at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from server.bench.client import Ask, Target, ask, introduce
from server.bench.load import Amount, Level, Run, run
from server.bench.measure import Ratio, Summary, ratio, summarize
from server.bench.prompts import Prompts
from server.bench.sample import Sample

PROMPTS_PER_RUN = 1_000_000  # every round and level has numbers of its own; no prompt comes twice to a server
RATIOS = ("output_tokens_per_s", "requests_per_s", "ttft_ms.p50", "itl_ms.p50", "itl_ms.p99", "e2e_ms.p50")

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run against every target."""

    levels: tuple[Level, ...]
    amount: Amount
    rounds: int
    warmup: int
    prompts: Prompts
    ask: Ask
    seed: int = 0
    timeout: float = 600.0
    slo: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One target at one level: all its runs, one a round."""

    target: Target
    level: Level
    runs: tuple[Run, ...]
    rounds: tuple[Summary, ...]
    whole: Summary
    ratios: Mapping[str, Ratio]


Runs = dict[tuple[int, int], list[Run]]  # (level, target) -> its runs


async def measure(targets: Sequence[Target], plan: Plan, say: Say) -> tuple[list[Target], list[Row]]:
    """Introduces, warms up and loads the targets; returns them with what was learnt of them, and the rows.

    With an amount in seconds, the first target's first run at a level fixes the number of requests of all others.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(target.client(plan.timeout)) for target in targets]
        known: list[Target] = []
        for client, target in zip(clients, targets, strict=True):
            say(f"first request to {target.label}")
            known.append(await introduce(client, target, plan.ask, plan.prompts(-1)))
        await warm_up(clients, known, plan, say)
        runs: Runs = {}
        amounts = [plan.amount] * len(plan.levels)
        for number in range(plan.rounds):
            for at, level in enumerate(plan.levels):
                first = (number * len(plan.levels) + at) * PROMPTS_PER_RUN
                for which, target in enumerate(known):
                    one = asker(clients[which], target, plan, say, f"round {number + 1}/{plan.rounds} {level}")
                    done = await run(one, level, amounts[at], first=first, seed=f"{plan.seed}:{first}")
                    amounts[at] = Amount(requests=len(done.samples))
                    runs.setdefault((at, which), []).append(done)
    return known, rows_of(known, plan, runs)


def asker(
    client: httpx.AsyncClient, target: Target, plan: Plan, say: Say, where: str
) -> Callable[[int], Awaitable[Sample]]:
    """Asks one target, and says how far it got."""
    done = 0

    async def one(index: int) -> Sample:
        nonlocal done
        sample = await ask(client, target, plan.ask, plan.prompts(index), index)
        done += 1
        say(f"{where} {target.label}: {done} requests")
        return sample

    return one


async def warm_up(clients: Sequence[httpx.AsyncClient], targets: Sequence[Target], plan: Plan, say: Say) -> None:
    """Requests that are not counted, at the highest concurrency of the plan."""
    if not plan.warmup:
        return
    clients_at_once = max((level.concurrency for level in plan.levels), default=0) or 1
    level = Level(concurrency=min(clients_at_once, plan.warmup))
    for client, target in zip(clients, targets, strict=True):
        one = asker(client, target, plan, say, "warm-up")
        await run(one, level, Amount(requests=plan.warmup), first=-1 - plan.warmup, seed="")


def rows_of(targets: Sequence[Target], plan: Plan, runs: Runs) -> list[Row]:
    """The figures, level by level."""
    rows: list[Row] = []
    for at, level in enumerate(plan.levels):
        base: tuple[Summary, ...] = ()
        for which, target in enumerate(targets):
            own = runs[at, which]
            rounds = tuple(
                summarize(each.samples, seconds=each.seconds, client_cpu=each.client_cpu, slo=plan.slo) for each in own
            )
            seconds = sum(each.seconds for each in own)
            whole = summarize(
                [sample for each in own for sample in each.samples],
                seconds=seconds,
                client_cpu=sum(each.client_cpu * each.seconds for each in own) / seconds,
                slo=plan.slo,
            )
            base = base or rounds
            rows.append(
                Row(
                    target=target,
                    level=level,
                    runs=tuple(own),
                    rounds=rounds,
                    whole=whole,
                    ratios=ratios_of(rounds, base),
                )
            )
    return rows


def ratios_of(rounds: Sequence[Summary], base: Sequence[Summary]) -> dict[str, Ratio]:
    """What can be compared, by name."""
    found = {
        name: ratio([each.figure(name) for each in rounds], [each.figure(name) for each in base]) for name in RATIOS
    }
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Difference:
    """Two answers to the same prompt that are not the same."""

    level: Level
    round: int
    prompt: int
    label: str
    text: str
    base_label: str
    base_text: str


@dataclass(frozen=True)
class Equality:
    """Answers of all targets against the first target's, in the same round at the same level."""

    compared: int
    differences: tuple[Difference, ...]


def compare_answers(rows: Sequence[Row]) -> Equality:
    """Only answers that both targets gave in full are compared."""
    compared = 0
    differences: list[Difference] = []
    base: Row | None = None
    for row in rows:
        if base is None or base.level != row.level:
            base = row
            continue
        for number, (ours, theirs) in enumerate(zip(row.runs, base.runs, strict=True)):
            answers = {sample.prompt: sample for sample in theirs.samples if sample.error is None}
            for sample in ours.samples:
                other = answers.get(sample.prompt)
                if sample.error is not None or other is None:
                    continue
                compared += 1
                if (sample.text, sample.finish) != (other.text, other.finish):
                    labels = (row.target.label, sample.text, base.target.label, other.text)
                    differences.append(Difference(row.level, number, sample.prompt, *labels))
    return Equality(compared, tuple(differences))
