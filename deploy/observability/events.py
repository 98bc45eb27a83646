"""What is drawn over the panels of every dashboard: moments that explain a change."""

from __future__ import annotations

from deploy.observability.board import Annotation
from deploy.observability.panels import Query
from deploy.observability.promql import BOARD

ALERTS = 'ALERTS{alertstate="firing",alertname=~"Lockstep.+",job=~"$job",namespace=~"$namespace"}'

ANNOTATIONS = (
    Annotation(
        "Draining",
        Query(f"{BOARD.gauge('draining', 'pod', how='max')} > 0", empty="nothing drains while the load runs"),
        "orange",
        "{{pod}} is draining",
    ),
    Annotation(
        "Engine started",
        Query(
            f"changes({BOARD.series('process_start_time_seconds')}[2m]) > 0", empty="the server started before the load"
        ),
        "blue",
        "{{pod}} started",
    ),
    Annotation(
        "Critical alerts",
        Query(ALERTS.replace("{", '{severity="critical",'), empty="nothing is wrong"),
        "red",
        "{{alertname}} {{pod}}",
    ),
)
