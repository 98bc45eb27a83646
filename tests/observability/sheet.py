"""Draws a dashboard from live data, each panel at its place in the grid: a picture of what Grafana would show."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from tests.observability.stack import Answer

mpl.use("Agg")

Json = dict[str, Any]
Ask = Callable[[str, bool], Answer]

BACK, CARD, TEXT, FAINT, GRID = "#111217", "#1b1d23", "#d8d9da", "#8e9099", "#2c2f36"
COLORS = {
    "green": "#56a64b",
    "orange": "#f2940a",
    "red": "#e02f44",
    "purple": "#8f3bb8",
    "blue": "#3274d9",
    "text": "#8e9099",
}
PALETTE = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#e02f44", "#8ab8ff", "#37872d", "#fade2a", "#c4162a")
COLUMN, ROW = 0.62, 0.40  # inches of a grid cell
SECTION = 0.55  # inches of a row's title


def number(value: float, unit: str, decimals: int | None = None) -> str:
    """A value as a panel shows it."""
    if math.isnan(value):
        return "No traffic"
    if unit == "percentunit":
        return f"{100 * value:.{decimals if decimals is not None else 1}f} %"
    if unit == "s":
        for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
        return "0 s" if value == 0 else f"{value:.1g} s"
    if unit in ("bytes", "Bps"):
        size, names = abs(value), ["B", "KiB", "MiB", "GiB", "TiB"]
        while size >= 1024 and len(names) > 1:
            size, names = size / 1024, names[1:]
        return f"{size:.3g} {names[0]}{'/s' if unit == 'Bps' else ''}"
    if unit == "sci":
        return f"{value:.2g}"
    suffix = {"reqps": " req/s", "ops": " /s"}.get(unit, unit.removeprefix("suffix:") if ":" in unit else "")
    if decimals is not None:
        return f"{value:,.{decimals}f}{suffix}"
    return f"{value:,.0f}{suffix}" if value == round(value) else f"{value:.3g}{suffix}"


def legend(text: str, labels: dict[str, str]) -> str:
    """A legend with its labels put in."""
    if text == "__auto":
        return ", ".join(value for name, value in labels.items() if name != "__name__") or "value"
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


class Sheet:
    """One picture of one dashboard. `ask(expression, instant)` gets the data."""

    def __init__(self, dashboard: Json, ask: Ask) -> None:
        self._ask = ask
        self._dashboard = dashboard
        panels = [each for panel in dashboard["panels"] for each in (panel, *panel.get("panels", []))]
        self._panels = [panel for panel in panels if panel["type"] != "row"]
        self._rows = [panel for panel in panels if panel["type"] == "row"]
        bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
        self.width = 24 * COLUMN
        self.height = bottom * ROW + 0.7
        self.figure = Figure(figsize=(self.width, self.height), facecolor=BACK)
        self.figure.text(
            0.2 / self.width, 1 - 0.42 / self.height, dashboard["title"], color=TEXT, size=15, weight="bold"
        )

    def _place(self, at: Json) -> tuple[float, float, float, float]:
        """left, bottom, width, height of a grid box, in inches."""
        return at["x"] * COLUMN, self.height - 0.7 - (at["y"] + at["h"]) * ROW, at["w"] * COLUMN, at["h"] * ROW

    def axes(self, box: tuple[float, float, float, float]) -> Axes:
        left, bottom, width, height = box
        return self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))

    def draw(self, path: Path) -> None:
        """Draws all of it and writes the file."""
        for row in self._rows:
            left, bottom, _, height = self._place(row["gridPos"])
            self.figure.text(
                (left + 0.2) / self.width, (bottom + 0.3 * height) / self.height, row["title"], color=TEXT, size=12
            )
        for panel in self._panels:
            left, bottom, width, height = self._place(panel["gridPos"])
            card = self.axes((left + 0.05, bottom + 0.05, width - 0.1, height - 0.1))
            card.set_axis_off()
            card.set_xlim(0, 1)
            card.set_ylim(0, 1)
            answers = [(target, self._ask(target["expr"], bool(target["instant"]))) for target in panel["targets"]]
            color = CARD
            if panel["type"] == "stat" and panel["options"]["colorMode"] == "background":
                color = self.color(panel, last(answers[0][1]))
            card.add_patch(FancyBboxPatch((0, 0), 1, 1, boxstyle="square,pad=0", color=color, transform=card.transAxes))
            self.figure.text(
                (left + 0.15) / self.width, (bottom + height - 0.27) / self.height, panel["title"], color=TEXT, size=9
            )
            inner = (left + 0.15, bottom + 0.12, width - 0.3, height - 0.5)
            DRAW[panel["type"]](self, panel, answers, inner)
        self.figure.savefig(path, dpi=96, facecolor=BACK, pil_kwargs={"optimize": True})
        shrink(path)

    def color(self, panel: Json, value: float) -> str:
        chosen = "text"
        if not math.isnan(value):
            for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
                if step["value"] is None or value >= step["value"]:
                    chosen = step["color"]
        return COLORS[chosen]

    def text(self, box: tuple[float, float, float, float], text: str, color: str, size: float) -> None:
        left, bottom, width, height = box
        self.figure.text(
            (left + width / 2) / self.width,
            (bottom + height / 2) / self.height,
            text,
            color=color,
            size=size,
            ha="center",
            va="center",
        )


def last(answer: Answer) -> float:
    """The newest value that is one, of the first series."""
    for _, points in answer.series:
        values = [value for _, value in points if not math.isnan(value)]
        if values:
            return values[-1]
    return math.nan


Answers = list[tuple[Json, Answer]]
Box = tuple[float, float, float, float]


def lines(answers: Answers) -> list[tuple[str, list[tuple[float, float]]]]:
    """Every series with its legend."""
    return [
        (legend(target["legendFormat"], labels), points)
        for target, answer in answers
        for labels, points in answer.series
    ]


def stat(sheet: Sheet, panel: Json, answers: Answers, box: Box) -> None:
    value = last(answers[0][1])
    defaults = panel["fieldConfig"]["defaults"]
    filled = panel["options"]["colorMode"] == "background"
    color = "white" if filled else sheet.color(panel, value)
    text = number(value, defaults["unit"], defaults.get("decimals"))
    sheet.text(box, text, color, 20 if len(text) < 9 else 15)
    if panel["options"]["graphMode"] == "area" and answers[0][1].series:
        left, bottom, width, height = box
        axes = sheet.axes((left, bottom, width, height * 0.35))
        axes.set_axis_off()
        points = answers[0][1].series[0][1]
        xs, ys = [t for t, _ in points], [v for _, v in points]
        axes.fill_between(xs, ys, color=color, alpha=0.25, lw=0)
        axes.plot(xs, ys, color=color, lw=1)


def timeseries(sheet: Sheet, panel: Json, answers: Answers, box: Box) -> None:
    found = lines(answers)
    defaults, custom = panel["fieldConfig"]["defaults"], panel["fieldConfig"]["defaults"]["custom"]
    left, bottom, width, height = box
    shown = found[:12]
    longest = max((len(name) for name, _ in shown), default=0)
    columns = max(1, int(width // (0.075 * (longest + 12))))
    space = 0.17 * math.ceil(len(shown) / columns) + 0.05
    axes = sheet.axes((left + 0.55, bottom + space + 0.22, width - 0.6, height - space - 0.22))
    style(axes, defaults["unit"])
    if not found:
        sheet.text(box, "No traffic", FAINT, 11)
        return
    start = min(t for _, points in found for t, _ in points)
    stacked = custom["stacking"]["mode"] == "normal"
    base: dict[float, float] = {}
    for i, (_, points) in enumerate(shown):
        color = PALETTE[i % len(PALETTE)]
        xs = [t - start for t, _ in points]
        low = [base.get(t, 0.0) if stacked else 0.0 for t, _ in points]
        ys = [b + (0.0 if math.isnan(v) else v) if stacked else v for b, (_, v) in zip(low, points, strict=True)]
        if stacked:
            base |= {t: y for (t, _), y in zip(points, ys, strict=True)}
            axes.fill_between(xs, low, ys, color=color, alpha=0.5, lw=0)
        axes.plot(xs, ys, color=color, lw=1.2)
    if custom["scaleDistribution"]["type"] == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: number(value, defaults["unit"]))
    else:
        low, high = axes.get_ylim()
        flat = all(value == 0 for _, points in shown for _, value in points)
        axes.set_ylim(defaults.get("min", low), 1.0 if flat else 1.05 * high)
    if custom["thresholdsStyle"]["mode"] == "dashed":
        for step in defaults["thresholds"]["steps"]:
            if step["value"] is not None and step["value"] <= axes.get_ylim()[1]:
                axes.axhline(step["value"], color=COLORS[step["color"]], lw=1, ls="--")
    for i, (name, points) in enumerate(shown):
        values = [value for _, value in points if not math.isnan(value)]
        text = f"{name}  {number(values[-1] if values else math.nan, defaults['unit'], defaults.get('decimals'))}"
        sheet.figure.text(
            (left + 0.02 + (i % columns) * width / columns) / sheet.width,
            (bottom + space - 0.17 * (1 + i // columns)) / sheet.height,
            "▬ " + text[: int(width / columns * 15)],
            color=PALETTE[i % len(PALETTE)],
            size=7,
        )


def style(axes: Axes, unit: str) -> None:
    axes.set_facecolor(CARD)
    axes.grid(color=GRID, lw=0.6)
    axes.tick_params(colors=FAINT, labelsize=7, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.yaxis.set_major_formatter(lambda value, _: number(value, unit))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    axes.yaxis.set_major_locator(mpl.ticker.MaxNLocator(4))


def bargauge(sheet: Sheet, panel: Json, answers: Answers, box: Box) -> None:
    found = [(name, points[-1][1]) for name, points in lines(answers)]
    defaults = panel["fieldConfig"]["defaults"]
    left, bottom, width, height = box
    axes = sheet.axes((left + 0.75, bottom + 0.05, width - 1.5, height - 0.1))
    axes.set_facecolor(CARD)
    most = defaults.get("max") or max((value for _, value in found), default=1.0) or 1.0
    for i, (name, value) in enumerate(found):
        axes.barh(i, most, color=GRID, height=0.7)
        axes.barh(i, value, color=sheet.color(panel, value), height=0.7)
        axes.text(-0.02 * most, i, name, color=TEXT, size=8, ha="right", va="center")
        axes.text(
            1.02 * most, i, number(value, defaults["unit"], defaults.get("decimals")), color=TEXT, size=8, va="center"
        )
    axes.set_xlim(0, most)
    axes.invert_yaxis()
    axes.set_axis_off()


def heatmap(sheet: Sheet, panel: Json, answers: Answers, box: Box) -> None:
    found = dict(lines(answers))
    left, bottom, width, height = box
    axes = sheet.axes((left + 0.55, bottom + 0.22, width - 0.6, height - 0.22))
    style(axes, panel["fieldConfig"]["defaults"]["unit"])
    bounds = sorted(found, key=float)
    times = sorted({t for points in found.values() for t, _ in points})
    cumulative = [[dict(found[bound]).get(t, 0.0) for t in times] for bound in bounds]
    cells = [
        [high - low for high, low in zip(row, cumulative[i - 1] if i else [0.0] * len(times), strict=True)]
        for i, row in enumerate(cumulative)
    ]
    used = [i for i, row in enumerate(cells) if max(row) > 0]
    first, final = (max(0, used[0] - 1), min(len(bounds), used[-1] + 2)) if used else (0, len(bounds))
    axes.imshow(
        [[math.sqrt(max(0.0, cell)) for cell in row] for row in cells[first:final]],
        aspect="auto",
        origin="lower",
        cmap="inferno",
        interpolation="nearest",
    )
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.grid(visible=False)
    names = [number(float(bound), unit) if bound != "+Inf" else "more" for bound in bounds[first:final]]
    every = max(1, len(names) // 6)
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.yaxis.set_major_formatter(mpl.ticker.FixedFormatter(names[::every]))
    ticks = range(0, len(times), max(1, len(times) // 5))
    axes.set_xticks(list(ticks), [f"{times[i] - times[0]:.0f} s" for i in ticks])
    axes.xaxis.set_major_formatter(mpl.ticker.FixedFormatter([f"{times[i] - times[0]:.0f} s" for i in ticks]))


def table(sheet: Sheet, panel: Json, answers: Answers, box: Box) -> None:
    order = panel["transformations"][-1]["options"]["renameByName"]
    units = {
        override["matcher"]["options"]: override["properties"][0]["value"]
        for override in panel["fieldConfig"]["overrides"]
    }
    merged: dict[tuple[str, ...], dict[str, str]] = {}
    keys = ("namespace", "pod", "model_name")
    for target, answer in answers:
        for labels, points in answer.series:
            key = tuple(labels.get(name, "") for name in keys) if "namespace" in labels else (labels.get("pod", ""),)
            row = merged.setdefault(key, {})
            row |= labels
            title = order.get(f"Value #{target['refId']}", "")
            row[f"Value #{target['refId']}"] = number(points[-1][1], units.get(title, "short"))
    left, bottom, width, height = box
    titles = list(order.items())
    for column, (field, title) in enumerate(titles):
        x = (left + column * width / len(titles)) / sheet.width
        sheet.figure.text(x, (bottom + height - 0.25) / sheet.height, title, color=FAINT, size=8, weight="bold")
        for i, row in enumerate(merged.values()):
            value = textwrap.shorten(row.get(field, ""), int(width / len(titles) * 12), placeholder="…")
            sheet.figure.text(x, (bottom + height - 0.55 - 0.25 * i) / sheet.height, value, color=TEXT, size=8)


def state_timeline(sheet: Sheet, panel: Json, answers: Answers, box: Box) -> None:
    mappings = panel["fieldConfig"]["defaults"]["mappings"][-1]["options"]
    left, bottom, width, height = box
    axes = sheet.axes((left + 0.75, bottom + 0.3, width - 0.8, height - 0.35))
    style(axes, "short")
    found = lines(answers)
    for i, (_, points) in enumerate(found):
        start = points[0][0]
        for (t, value), (after, _) in zip(points, [*points[1:], (points[-1][0] + 1, 0.0)], strict=True):
            meaning = mappings.get(f"{value:g}", {"color": "text"})
            axes.barh(i, after - t, left=t - start, color=COLORS[meaning["color"]], height=0.6)
        text = mappings.get(f"{points[-1][1]:g}", {"text": "?"})["text"]
        axes.text(1, i, text, color="white", size=9, va="center")
    axes.set_yticks(range(len(found)), [name for name, _ in found])
    axes.yaxis.set_major_formatter(mpl.ticker.FixedFormatter([name for name, _ in found]))
    axes.set_ylim(-1, len(found))
    axes.grid(visible=False)


DRAW: dict[str, Callable[[Sheet, Json, Answers, Box], None]] = {
    "stat": stat,
    "timeseries": timeseries,
    "bargauge": bargauge,
    "heatmap": heatmap,
    "table": table,
    "state-timeline": state_timeline,
}


def shrink(path: Path) -> None:
    """A palette instead of full colours: a third of the bytes."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128)
    small.save(path, optimize=True)
