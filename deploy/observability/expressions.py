"""Every PromQL expression that lies in deploy/, as its reader (Grafana, Prometheus, KEDA, the adapter) will run it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LABEL_VALUES = re.compile(r"label_values\((.+), *(\w+)\)")


@dataclass(frozen=True, slots=True)
class Expression:
    """One expression. `where` names its place, `legend` shows its labels; panel and index are those of a target."""

    where: str
    text: str
    legend: str = ""
    panel: int = 0
    index: int = 0


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Panels, those in folded rows too, and the rows."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def of_panels(dashboard: dict[str, Any]) -> Iterator[Expression]:
    """Of the panels' targets."""
    for panel in panels(dashboard):
        for index, target in enumerate(panel.get("targets", [])):
            where = f"{dashboard['uid']} / {panel['title']} / {target['refId']}"
            legend = "" if target["legendFormat"] == "__auto" else target["legendFormat"]
            yield Expression(where, target["expr"], legend, panel["id"], index)


def of_annotations(dashboard: dict[str, Any]) -> Iterator[Expression]:
    """Of the annotations."""
    for each in dashboard["annotations"]["list"]:
        yield Expression(f"{dashboard['uid']} / annotation {each['name']}", each["expr"], each["titleFormat"])


def of_variables(dashboard: dict[str, Any]) -> Iterator[tuple[Expression, str]]:
    """The selector of each variable, and the label whose values it lists."""
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = LABEL_VALUES.fullmatch(variable["query"]["query"])
            if match is None:
                raise ValueError(f"variable {variable['name']} is not label_values(selector, label)")
            yield Expression(f"{dashboard['uid']} / variable {variable['name']}", match.group(1)), match.group(2)


def dashboards(root: Path) -> list[dict[str, Any]]:
    """The committed dashboards."""
    paths = sorted((root / "deploy/grafana/dashboards").glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def rule_groups(root: Path) -> list[dict[str, Any]]:
    """The committed rules, by group."""
    groups: list[dict[str, Any]] = yaml.safe_load((root / "deploy/prometheus/rules.yml").read_text())["groups"]
    return groups


def autoscaling(root: Path) -> Iterator[Expression]:
    """KEDA's triggers, and what prometheus-adapter asks for the HPA (for all pods of the namespace `lockstep`)."""
    for path in sorted((root / "deploy/kustomize").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if not isinstance(document, dict) or document.get("kind") != "ScaledObject":
                continue
            for trigger in document.get("spec", {}).get("triggers", []):
                if trigger["type"] == "prometheus":
                    yield Expression(f"{path.relative_to(root)} / {trigger.get('name')}", trigger["metadata"]["query"])
    for name, text in adapter(root).items():
        yield Expression(f"deploy/prometheus/adapter-values.yaml / {name}", text)


def adapter(root: Path) -> dict[str, str]:
    """The custom metrics the adapter offers, and its query for each."""
    path = root / "deploy/prometheus/adapter-values.yaml"
    if not path.is_file():
        return {}
    offered = {}
    for rule in yaml.safe_load(path.read_text(encoding="utf-8"))["rules"]["custom"]:
        query = rule["metricsQuery"]
        for template, text in (
            ("<<.Series>>", rule["seriesQuery"].partition("{")[0]),
            ("<<.LabelMatchers>>", 'namespace="lockstep"'),
            ("<<.GroupBy>>", "pod"),
        ):
            query = query.replace(template, text)
        offered[rule["name"]["as"]] = query
    return offered


def custom_metrics(root: Path) -> set[str]:
    """The custom metrics that HPAs name."""
    names = set()
    for path in sorted((root / "deploy/kustomize").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if isinstance(document, dict) and document.get("kind") == "HorizontalPodAutoscaler":
                metrics = document["spec"].get("metrics", [])
                names |= {metric["pods"]["metric"]["name"] for metric in metrics if metric["type"] == "Pods"}
    return names
