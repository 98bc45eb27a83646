"""Recording rules of the objectives, and alerts while a budget burns too fast in a long and a short window."""

from __future__ import annotations

from typing import Any

from deploy.observability.alerts import SERVICE_LABELS, Alert, Case, series
from deploy.observability.promql import Scope
from deploy.observability.slo import FAST, LONG_WINDOWS, OBJECTIVES, PERIOD, SLOW, WINDOWS, Burn, Objective

RATIO = "lockstep:slo_bad:ratio_rate"
EVENTS = "lockstep:slo_bad:increase"
RULES = Scope()


def recordings() -> list[dict[str, Any]]:
    """For the rules file."""
    made: list[dict[str, Any]] = []
    for objective in OBJECTIVES:
        labels = {"slo": objective.name}
        for window in WINDOWS:
            made.append({"record": RATIO + window, "expr": objective.bad_ratio(RULES, window), "labels": labels})
        for window in LONG_WINDOWS:
            made.append({"record": EVENTS + window, "expr": objective.bad_events(RULES, window), "labels": labels})
    return made


def _burns(objective: Objective, burns: tuple[Burn, ...]) -> str:
    slo = f'{{slo="{objective.name}"}}'
    return " or ".join(
        f"({RATIO}{burn.long}{slo} > {burn.factor:g} * {objective.budget:g} "
        f"and {RATIO}{burn.short}{slo} > {burn.factor:g} * {objective.budget:g} "
        f"and {EVENTS}{burn.long}{slo} >= {objective.least})"
        for burn in burns
    )


def _traffic(objective: Objective, good: int, bad: int, minutes: int) -> dict[str, str]:
    """Events a minute from the start on, by the counters the objective is made of."""
    if objective.name == "availability":
        return {
            series("lockstep_requests_total", finish_reason="stop"): f"0+{good}x{minutes}",
            series("lockstep_requests_total", finish_reason="error"): f"0+{bad}x{minutes}",
            series("lockstep_requests_rejected_total", reason="queue_full"): f"0x{minutes}",
        }
    name, bound = objective.good[0].name, objective.good[0].where
    le = bound.split('"')[1]
    return {
        series(f"lockstep_{name}_bucket", le=le): f"0+{good}x{minutes}",
        series(f"lockstep_{name}_count"): f"0+{good + bad}x{minutes}",
    }


def burning(objective: Objective) -> tuple[Alert, Alert]:
    """The alert that wakes somebody, and the one that can wait until morning."""
    name = f"Lockstep{objective.title.title().replace(' ', '')}"
    text = "{{ $labels.namespace }}, {{ $labels.model_name }}: {{ $value | humanizePercentage }}"
    means = f"are bad; {_percent(objective.budget)} may be. Good are {objective.says}."
    many = 10 * max(objective.least, round(1 / objective.budget))
    fast_bad = round(many * min(0.99, 20 * objective.budget))
    slow_bad = round(many * 4 * objective.budget)
    labels = {**SERVICE_LABELS, "slo": objective.name}
    fast = Alert(
        name=f"{name}BudgetBurnsFast",
        expr=_burns(objective, FAST),
        wait="2m",
        severity="critical",
        summary=f"{objective.title}: {PERIOD} of budget are gone in five days or less",
        description=f"{text} {means}",
        board="lockstep-overview",
        fires=Case(_traffic(objective, many - fast_bad, fast_bad, 30), "20m", labels, _percent(fast_bad / many)),
        quiet=Case(_traffic(objective, many - slow_bad, slow_bad, 30), "20m"),
    )
    slow = Alert(
        name=f"{name}BudgetBurnsSlowly",
        expr=_burns(objective, SLOW),
        wait="15m",
        severity="warning",
        summary=f"{objective.title}: {PERIOD} of budget will not last",
        description=f"{text} {means}",
        board="lockstep-overview",
        fires=Case(_traffic(objective, many - slow_bad, slow_bad, 40), "30m", labels, _percent(slow_bad / many)),
        quiet=Case(_traffic(objective, many, 0, 40), "30m"),
    )
    return fast, slow


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.4g}%"


SLO_ALERTS = tuple(alert for objective in OBJECTIVES for alert in burning(objective))
