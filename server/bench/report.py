"""Rows as an aligned table, and everything as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from server.bench.client import Ask, BenchError, Target
from server.bench.measure import DEFINITIONS, SPREAD_EVENLY, Ratio, Summary
from server.bench.rounds import Equality, Plan, Row

SCHEMA = 1
SHOWN_DIFFERENCES = 3
BUSY_CLIENT = 0.5
NONE = "-"


def number(value: float | None) -> str:
    """With about three digits."""
    if value is None:
        return NONE
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def spread(figures: Mapping[str, float] | None, names: Sequence[str] = ("p50", "p90", "p99")) -> str:
    """Percentiles side by side."""
    return NONE if figures is None else " / ".join(number(figures[name]) for name in names)


def ratio(value: Ratio | None) -> str:
    """Median and range."""
    if value is None:
        return NONE
    if set(value.rounds) == {1.0}:
        return "1"
    return f"{value.median:.2f} ({min(value.rounds):.2f}..{max(value.rounds):.2f})"


def share(value: float | None) -> str:
    """As per cent."""
    return NONE if value is None else f"{value:.1%}"


def goodput(figures: Summary) -> str:
    """Good requests per second and their share."""
    if figures.goodput_per_s is None or figures.good_requests is None:
        return NONE
    return f"{number(figures.goodput_per_s)} ({figures.good_requests / max(figures.requests, 1):.0%})"


Column = tuple[str, Callable[[Row], str]]
LOAD: Column = ("load", lambda row: str(row.level))
TARGET: Column = ("target", lambda row: row.target.label)
RATE: Column = ("tok/s", lambda row: number(row.whole.output_tokens_per_s))
RATIO: Column = ("ratio", lambda row: ratio(row.ratios.get("output_tokens_per_s")))
ACCEPTANCE: Column = ("accept", lambda row: share(row.whole.acceptance))
PER_VERIFICATION: Column = ("tok/verif", lambda row: number(row.whole.tokens_per_verification))
TTFT: Column = ("TTFT ms p50/p90/p99", lambda row: spread(row.whole.ttft_ms))
TTFT_SHORT: Column = ("TTFT ms p50/p90", lambda row: spread(row.whole.ttft_ms, ("p50", "p90")))
ITL: Column = ("ITL ms p50/p90/p99", lambda row: spread(row.whole.itl_ms))
ERRORS: Column = ("errors", lambda row: str(sum(row.whole.errors.values())))

SERVE_COLUMNS: tuple[Column, ...] = (
    LOAD,
    TARGET,
    ("req", lambda row: str(row.whole.requests)),
    ERRORS,
    RATE,
    RATIO,
    ("req/s", lambda row: number(row.whole.requests_per_s)),
    TTFT,
    ITL,
    ("TPOT ms p50/p90/p99", lambda row: spread(row.whole.tpot_ms)),
    ("e2e ms p50/p90/p99", lambda row: spread(row.whole.e2e_ms)),
    ACCEPTANCE,
    PER_VERIFICATION,
    ("goodput/s", lambda row: goodput(row.whole)),
)
RATIO_COLUMNS: tuple[Column, ...] = (
    LOAD,
    ("ratio of", lambda row: row.target.label),
    ("tok/s", lambda row: ratio(row.ratios.get("output_tokens_per_s"))),
    ("TTFT p50", lambda row: ratio(row.ratios.get("ttft_ms.p50"))),
    ("ITL p50", lambda row: ratio(row.ratios.get("itl_ms.p50"))),
    ("ITL p99", lambda row: ratio(row.ratios.get("itl_ms.p99"))),
    ("e2e p50", lambda row: ratio(row.ratios.get("e2e_ms.p50"))),
)
SPECULATION_COLUMNS: tuple[Column, ...] = (
    LOAD,
    ("speculative", lambda row: row.target.label),
    RATE,
    RATIO,
    ACCEPTANCE,
    PER_VERIFICATION,
    TTFT_SHORT,
    ITL,
    ERRORS,
)


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Aligned text; columns in which nobody says anything are left out."""
    filled = [(title, [cell(row) for row in rows]) for title, cell in columns]
    filled = [(title, cells) for title, cells in filled if any(text != NONE for text in cells)]
    widths = [max(len(title), *map(len, cells)) for title, cells in filled]
    lines = [[title for title, _ in filled], ["-" * width for width in widths]]
    lines += [list(line) for line in zip(*(cells for _, cells in filled), strict=True)]
    aligned = (
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
    return "\n".join(aligned) + "\n"


def definitions(names: Sequence[str]) -> str:
    """What the words of a table mean."""
    return "".join(f"{name}: {DEFINITIONS[name]}.\n" for name in names)


def notes(rows: Sequence[Row]) -> str:
    """What a reader must know of these figures: errors by kind, and a client that was itself busy."""
    lines: list[str] = []
    for row in rows:
        lines += [f"{row.level} {row.target.label}: {count} x {error}" for error, count in row.whole.errors.items()]
    if any(row.whole.tokens_of_emissions == SPREAD_EVENLY for row in rows):
        lines.append("Some servers send no token ids: their ITL takes the tokens of a request as spread evenly.")
    busy = max((row.whole.client_cpu for row in rows), default=0.0)
    if busy > BUSY_CLIENT:
        lines.append(f"This client used up to {busy:.0%} of a core: on a small machine it slows the servers down.")
    return "".join(line + "\n" for line in lines)


def equality_lines(equality: Equality) -> str:
    """The verdict, and the first differences."""
    lines = [f"answers compared with the first setting's: {equality.compared}, different: {len(equality.differences)}"]
    for difference in equality.differences[:SHOWN_DIFFERENCES]:
        lines += [
            f"  {difference.level} round {difference.round + 1} prompt {difference.prompt}:",
            f"    {difference.base_label}: {difference.base_text[:300]!r}",
            f"    {difference.label}: {difference.text[:300]!r}",
        ]
    return "\n".join(lines) + "\n"


def described_target(target: Target) -> dict[str, Any]:
    """A target without its key."""
    return {"label": target.label, "url": target.url, "model": target.model, "extras": dict(target.extras)}


def described_plan(plan: Plan) -> dict[str, Any]:
    """The workload."""
    ask: Ask = plan.ask
    return {
        "prompts": {"type": type(plan.prompts).__name__} | dict(vars(plan.prompts)),
        "ask": vars(ask) | {"fields": dict(ask.fields)},
        "levels": [dataclasses.asdict(level) for level in plan.levels],
        "amount": dataclasses.asdict(plan.amount),
        "rounds": plan.rounds,
        "warmup": plan.warmup,
        "seed": plan.seed,
        "slo_seconds": dict(plan.slo),
    }


def described_row(row: Row) -> dict[str, Any]:
    """One row with its rounds and every request."""
    return {
        "target": row.target.label,
        "level": dataclasses.asdict(row.level),
        "summary": dataclasses.asdict(row.whole),
        "ratios": {name: value.as_dict() for name, value in row.ratios.items()},
        "rounds": [
            {"summary": dataclasses.asdict(summary), "requests": [sample.record() for sample in run.samples]}
            for summary, run in zip(row.rounds, row.runs, strict=True)
        ],
    }


def document(
    header: Mapping[str, Any], targets: Sequence[Target], plan: Plan, rows: Sequence[Row], equality: Equality | None
) -> dict[str, Any]:
    """Everything. `header` says when, where and by which command."""
    result = {
        "schema": SCHEMA,
        **header,
        "definitions": DEFINITIONS,
        "workload": described_plan(plan),
        "targets": [described_target(target) for target in targets],
        "rows": [described_row(row) for row in rows],
    }
    if equality is not None:
        result["equality"] = {
            "compared": equality.compared,
            "different": len(equality.differences),
            "differences": [dataclasses.asdict(difference) for difference in equality.differences[:100]],
        }
    return result


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """The file; raises BenchError."""
    try:
        Path(path).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}.") from error
