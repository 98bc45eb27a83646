"""Panels as data, and the JSON that Grafana (10 and later) reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deploy.observability.promql import BOARD

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
NO_TRAFFIC = "No traffic"
METRIC = re.compile(r"\b(?:lockstep|process)_[a-z0-9_]*[a-z0-9]\b|\b(?:ALERTS|up)\b")
HISTOGRAM_PARTS = re.compile(r"_(?:bucket|sum|count)$")

Json = dict[str, Any]
Step = tuple[float | None, str]

GREEN: tuple[Step, ...] = ((None, "green"),)
ZERO_IS_GOOD: tuple[Step, ...] = ((None, "green"), (0.000001, "red"))
FILLING: tuple[Step, ...] = ((None, "green"), (0.8, "orange"), (0.95, "red"))


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression. `empty` says why it may have no data under load that is all right; else it must have."""

    expr: str
    legend: str = ""
    empty: str = ""


def quantiles(name: str, where: str = "") -> list[Query]:
    """Median, 95th and 99th percentile of a histogram."""
    return [Query(BOARD.quantile(q, name, where=where), f"p{100 * q:g}") for q in (0.5, 0.95, 0.99)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `why` is what it tells; the names of its metrics are added to the description.

    `width` is of 24 columns, `height` in rows of the grid. `thresholds` are lower bounds with their colours; `lines`
    draws them. `columns` maps a table's fields (`Value #A`, a label) to their titles, in order, other fields are
    hidden; `units` gives units of single columns by title. `values` shows numbers as (text, colour).
    """

    title: str
    kind: Literal["timeseries", "stat", "bargauge", "heatmap", "table", "state-timeline"]
    queries: Sequence[Query]
    unit: str
    why: str
    width: int = 8
    height: int = 7
    stack: bool = False
    bars: bool = False
    lines: bool = False
    thresholds: tuple[Step, ...] = GREEN
    minimum: float | None = 0.0
    maximum: float | None = None
    decimals: int | None = None
    log: bool = False
    instant: bool = False
    none: str = NO_TRAFFIC
    columns: tuple[tuple[str, str], ...] = ()
    units: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[float, str, str], ...] = ()
    background: bool = False

    @property
    def description(self) -> str:
        """What it tells, and from which metrics."""
        found = sorted({HISTOGRAM_PARTS.sub("", name) for q in self.queries for name in METRIC.findall(q.expr)})
        return f"{self.why}\n\nMetrics: {', '.join(f'`{name}`' for name in found)}"

    def json(self, number: int, x: int, y: int) -> Json:
        """The panel with its id, at its place."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": dict(DATASOURCE),
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": [self._target(i, query) for i, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": self._overrides()},
            "options": OPTIONS[self.kind](self),
        } | self._transformations()

    def _target(self, index: int, query: Query) -> Json:
        instant = self.instant or self.kind in ("table", "bargauge")
        return {
            "refId": chr(ord("A") + index),
            "datasource": dict(DATASOURCE),
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "format": {"table": "table", "heatmap": "heatmap"}.get(self.kind, "time_series"),
            "instant": instant,
            "range": not instant,
            "editorMode": "code",
        }

    def _defaults(self) -> Json:
        steps = [{"color": color, "value": value} for value, color in self.thresholds]
        defaults: Json = {
            "unit": self.unit,
            "mappings": self._mappings(),
            "noValue": self.none,
            "thresholds": {"mode": "absolute", "steps": steps},
            "color": {"mode": "palette-classic" if self.kind == "timeseries" else "thresholds"},
        }
        for name, value in (("min", self.minimum), ("max", self.maximum), ("decimals", self.decimals)):
            if value is not None:
                defaults[name] = value
        if self.kind == "timeseries":
            defaults["custom"] = {
                "drawStyle": "bars" if self.bars else "line",
                "lineWidth": 1,
                "fillOpacity": 60 if self.bars else 30 if self.stack else 8,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"mode": "normal" if self.stack else "none", "group": "A"},
                "scaleDistribution": {"type": "log", "log": 10} if self.log else {"type": "linear"},
                "thresholdsStyle": {"mode": "dashed" if self.lines else "off"},
            }
        elif self.kind == "state-timeline":
            defaults["custom"] = {"lineWidth": 0, "fillOpacity": 80}
        elif self.kind == "table":
            defaults["custom"] = {"align": "auto", "filterable": True}
        return defaults

    def _mappings(self) -> list[Json]:
        special = {"match": "null+nan", "result": {"text": self.none, "color": "text", "index": 0}}
        mappings: list[Json] = [{"type": "special", "options": special}]
        if self.values:
            options = {
                f"{value:g}": {"text": text, "color": color, "index": i + 1}
                for i, (value, text, color) in enumerate(self.values)
            }
            mappings.append({"type": "value", "options": options})
        return mappings

    def _overrides(self) -> list[Json]:
        return [
            {"matcher": {"id": "byName", "options": title}, "properties": [{"id": "unit", "value": unit}]}
            for title, unit in self.units
        ]

    def _transformations(self) -> Json:
        if self.kind != "table":
            return {}
        shown = [name for name, _ in self.columns]
        keep = {"id": "filterFieldsByName", "options": {"include": {"names": shown}}}
        order = {
            "indexByName": {name: i for i, name in enumerate(shown)},
            "renameByName": dict(self.columns),
            "excludeByName": {},
        }
        return {"transformations": [{"id": "merge", "options": {}}, keep, {"id": "organize", "options": order}]}


_REDUCE = {"calcs": ["lastNotNull"], "fields": "", "values": False}


def _timeseries(_: Panel) -> Json:
    return {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _stat(panel: Panel) -> Json:
    return {
        "reduceOptions": dict(_REDUCE),
        "orientation": "auto",
        "textMode": "auto",
        "colorMode": "background" if panel.background else "value",
        "graphMode": "none" if panel.background or panel.instant else "area",
        "justifyMode": "auto",
    }


def _bargauge(_: Panel) -> Json:
    return {
        "reduceOptions": dict(_REDUCE),
        "orientation": "horizontal",
        "displayMode": "basic",
        "valueMode": "text",
        "showUnfilled": True,
        "minVizWidth": 8,
        "minVizHeight": 16,
    }


def _heatmap(panel: Panel) -> Json:
    return {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange"},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"show": True, "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit},
    }


def _table(_: Panel) -> Json:
    return {"showHeader": True, "cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"]}}


def _state_timeline(_: Panel) -> Json:
    return {
        "mergeValues": True,
        "rowHeight": 0.8,
        "showValue": "auto",
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }


OPTIONS = {
    "timeseries": _timeseries,
    "stat": _stat,
    "bargauge": _bargauge,
    "heatmap": _heatmap,
    "table": _table,
    "state-timeline": _state_timeline,
}
