"""An alert as data, each with a case in which it must fire and one close by in which it must not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RUNBOOK = "docs/runbook.md"

# One replica as the cases know it: the labels its target has, and the model.
TARGET = {"job": "lockstep", "namespace": "ai", "pod": "a", "instance": "a:8000"}
REPLICA = {**TARGET, "model_name": "m"}
OTHER = {**REPLICA, "pod": "b", "instance": "b:8000"}
SERVICE_LABELS = {"job": "lockstep", "namespace": "ai", "model_name": "m"}
DRAFTER = {"method": "mtp"}


def series(name: str, labels: Mapping[str, str] = REPLICA, /, **more: str) -> str:
    """A series as promtool writes it."""
    inside = ",".join(f'{label}="{value}"' for label, value in {**labels, **more}.items())
    return f"{name}{{{inside}}}"


@dataclass(frozen=True, slots=True)
class Case:
    """Input for `promtool test rules`: series with their values, one a minute, and when to look.

    A case that fires says with which labels (beside the alert's own), and what `$value` reads like in the description.
    """

    inputs: Mapping[str, str]
    at: str
    labels: Mapping[str, str] = field(default_factory=dict)
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. `wait` is how long the expression must hold; `board` the dashboard to open first."""

    name: str
    expr: str
    wait: str
    severity: Literal["critical", "warning"]
    summary: str
    description: str
    board: str
    fires: Case
    quiet: Case
    # Why an operand may have no data although the server is well; else the live test wants some for each.
    empty: str = ""

    @property
    def anchor(self) -> str:
        """Its heading in the runbook."""
        return self.name.lower()

    def annotations(self) -> dict[str, str]:
        """What the alert carries."""
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{RUNBOOK}#{self.anchor}",
            "dashboard": f"/d/{self.board}",
        }

    def rule(self) -> dict[str, Any]:
        """For the rules file."""
        waits = {"for": self.wait} if self.wait != "0m" else {}
        return {
            "alert": self.name,
            "expr": self.expr,
            **waits,
            "labels": {"severity": self.severity},
            "annotations": self.annotations(),
        }

    def tests(self) -> list[dict[str, Any]]:
        """For promtool: fires with exactly these labels and words; stays quiet."""
        fired = {
            "exp_labels": {"severity": self.severity, **self.fires.labels},
            "exp_annotations": {name: self._rendered(text) for name, text in self.annotations().items()},
        }
        return [self._test("fires", self.fires, [fired]), self._test("stays quiet", self.quiet, [])]

    def _test(self, what: str, case: Case, expected: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "name": f"{self.name} {what}",
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in case.inputs.items()],
            "alert_rule_test": [{"eval_time": case.at, "alertname": self.name, "exp_alerts": expected}],
        }

    def _rendered(self, text: str) -> str:
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: self.fires.labels[found.group(1)], text)
        return re.sub(r"\{\{ \$value[^}]*\}\}", lambda _: self.fires.value, text)
