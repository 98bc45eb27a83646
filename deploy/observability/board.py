"""A dashboard: sections of panels laid out in a grid, variables, annotations, links to the other dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.observability.panels import DATASOURCE, Json, Panel, Query

COLUMNS = 24
TAG = "lockstep"
ANCHOR = "lockstep_engine_up"


@dataclass(frozen=True, slots=True)
class Section:
    """A row of the dashboard and what lies under it. A folded one costs no query until somebody opens it."""

    title: str
    panels: Sequence[Panel]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Annotation:
    """Events drawn over all panels, from an expression that is above 0 while they last."""

    name: str
    query: Query
    color: str
    title: str


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `uid` is stable: links and bookmarks carry it."""

    uid: str
    title: str
    about: str
    sections: Sequence[Section]
    annotations: Sequence[Annotation]

    def json(self) -> Json:
        """What Grafana imports."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": [TAG],
            "style": "dark",
            "timezone": "browser",
            "editable": True,
            "graphTooltip": 1,
            "schemaVersion": 39,
            "version": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": variables()},
            "annotations": {"list": [_annotation(each) for each in self.annotations]},
            "links": [_link()],
            "panels": self._panels(),
        }

    def _panels(self) -> list[Json]:
        made: list[Json] = []
        number, y = 1, 0
        for section in self.sections:
            row: Json = {
                "id": number,
                "type": "row",
                "title": section.title,
                "collapsed": section.folded,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
                "panels": [],
            }
            made.append(row)
            number, y = number + 1, y + 1
            inside: list[Json] = []
            for panel, x, below in places(section.panels):
                inside.append(panel.json(number, x, y + below))
                number += 1
            if inside:
                y = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in inside)
            (row["panels"] if section.folded else made).extend(inside)
        return made

    def queries(self) -> Iterator[tuple[int, int, Query]]:
        """Every query of every panel, as (panel id, index, query): ids as in the JSON."""
        number = 1
        for section in self.sections:
            number += 1
            for panel in section.panels:
                yield from ((number, i, query) for i, query in enumerate(panel.queries))
                number += 1


def places(panels: Sequence[Panel]) -> Iterator[tuple[Panel, int, int]]:
    """Panels from left to right, a new line where one does not fit: (panel, x, y)."""
    x = y = tallest = 0
    for panel in panels:
        if x + panel.width > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        yield panel, x, y
        x, tallest = x + panel.width, max(tallest, panel.height)


def variables() -> list[Json]:
    """datasource, job, namespace, model_name, pod: each is narrowed by those before it.

    "All" of a label that a target may not have (no Kubernetes, no pod) has to match its absence too. "All" jobs are
    spelt out, since `process_*` of every other program would match.
    """
    chosen = ""
    made: list[Json] = [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "regex": "",
            "refresh": 1,
            "hide": 0,
            "multi": False,
            "includeAll": False,
            "options": [],
            "current": {},
        }
    ]
    for name, label, everything in (
        ("job", "Job", None),
        ("namespace", "Namespace", ".*"),
        ("model_name", "Model", ".*"),
        ("pod", "Pod", ".*"),
    ):
        query = f"label_values({ANCHOR}{{{chosen}}}, {name})" if chosen else f"label_values({ANCHOR}, {name})"
        variable: Json = {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": dict(DATASOURCE),
            "query": {"query": query, "refId": f"variable-{name}"},
            "regex": "",
            "refresh": 2,
            "sort": 1,
            "hide": 0,
            "multi": True,
            "includeAll": True,
            "options": [],
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }
        if everything is not None:
            variable["allValue"] = everything
        made.append(variable)
        chosen += f'{"," if chosen else ""}{name}=~"${name}"'
    return made


def _annotation(annotation: Annotation) -> Json:
    return {
        "name": annotation.name,
        "datasource": dict(DATASOURCE),
        "enable": True,
        "hide": False,
        "iconColor": annotation.color,
        "expr": annotation.query.expr,
        "titleFormat": annotation.title,
    }


def _link() -> Json:
    return {
        "title": "Lockstep",
        "type": "dashboards",
        "icon": "external link",
        "tooltip": "The other Lockstep dashboards, with the same variables and time range.",
        "tags": [TAG],
        "asDropdown": False,
        "targetBlank": False,
        "includeVars": True,
        "keepTime": True,
        "url": "",
    }
