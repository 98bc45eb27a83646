"""The overview's panels of the service-level objectives."""

from __future__ import annotations

from deploy.observability.board import Section
from deploy.observability.panels import Panel, Query, Step
from deploy.observability.promql import BOARD
from deploy.observability.slo import OBJECTIVES, PERIOD, Objective


def attainment(objective: Objective) -> Panel:
    """The share of good events in the time shown."""
    steps: tuple[Step, ...] = (
        (None, "red"),
        (round(1 - 2 * objective.budget, 9), "orange"),
        (objective.target, "green"),
    )
    return Panel(
        title=f"{objective.title}: good",
        kind="stat",
        queries=[Query(objective.good_ratio(BOARD, "$__range", by=""))],
        unit="percentunit",
        decimals=2,
        maximum=1.0,
        thresholds=steps,
        instant=True,
        why=f"Share of good events in the time shown; the objective is {objective.target:.4g}. Good are "
        f"{objective.says}.",
        width=4,
        height=4,
    )


def budget(objective: Objective) -> Panel:
    """What is left of the month's budget."""
    return Panel(
        title=f"{objective.title}: budget left",
        kind="stat",
        queries=[Query(f"clamp_min(1 - ({objective.bad_ratio(BOARD, PERIOD, by='')}) / {objective.budget:g}, -1)")],
        unit="percentunit",
        decimals=0,
        minimum=None,
        thresholds=((None, "red"), (0.0, "orange"), (0.25, "green")),
        instant=True,
        why=f"Of the {objective.budget:.4g} of all events that may be bad in {PERIOD}, the share not yet used up. "
        "Below 0 the objective is missed; -100 % is twice the budget, or more.",
        width=4,
        height=4,
    )


def burn(objective: Objective) -> Panel:
    """How fast the budget burns."""
    return Panel(
        title=f"{objective.title}: burn rate",
        kind="timeseries",
        queries=[
            Query(f"({objective.bad_ratio(BOARD, window, by='')}) / {objective.budget:g}", window)
            for window in ("5m", "1h", "6h")
        ],
        unit="suffix:x",
        decimals=1,
        thresholds=((None, "green"), (1.0, "orange"), (6.0, "red")),
        lines=True,
        why=f"1 uses up the budget in exactly {PERIOD}. The fast alert fires at 14.4 over one hour or 6 over six "
        "hours, the slow one at 3 over a day or 1 over three.",
        height=6,
    )


OBJECTIVES_SECTION = Section(
    "Objectives",
    [panel for objective in OBJECTIVES for panel in (attainment(objective), budget(objective))]
    + [burn(objective) for objective in OBJECTIVES],
)
