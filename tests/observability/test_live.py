"""Every expression of every dashboard, rule and autoscaler, asked of a Prometheus that watched a server under load."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy.observability import expressions
from deploy.observability.__main__ import BOARDS
from deploy.observability.families import FAMILIES, TARGET_LABELS, resolve
from deploy.observability.lint import legend_labels, unfiltered
from deploy.observability.rules import ALERTS, GROUPS
from tests.observability.stack import ROOT, Answer, Observed

pytestmark = [pytest.mark.observability, pytest.mark.timeout(600)]

DASHBOARDS = expressions.dashboards(ROOT)
LARGEST = 300_000  # bytes of a picture in the repository


def fault(answer: Answer, empty: str) -> str:
    """What is wrong with an answer; `empty` is the reason why it may have no data."""
    if answer.error:
        return answer.error
    if answer.warnings:
        return f"warnings: {answer.warnings}"
    if not answer.has_data and not empty:
        return "no data" if not answer.series else "nothing but NaN"
    return ""


def total(observed: Observed, name: str, *parts: str) -> float:
    """The sum of a metric's series whose labels have these parts, when all was over."""
    rows = (line.rsplit(" ", 1) for line in observed.page.splitlines() if not line.startswith("#"))
    return sum(float(v) for key, v in rows if key.split("{")[0] == name and all(part in key for part in parts))


def test_the_load_was_of_every_kind(observed: Observed) -> None:
    """Else the other tests say little."""
    for name, part in (
        ("lockstep_requests_total", 'finish_reason="stop"'),
        ("lockstep_requests_total", 'finish_reason="length"'),
        ("lockstep_requests_total", 'finish_reason="abort"'),
        ("lockstep_requests_rejected_total", 'reason="queue_full"'),
        ("lockstep_requests_rejected_total", 'reason="too_long"'),
        ("lockstep_requests_rejected_total", 'reason="invalid"'),
        ("lockstep_request_preemptions_total", ""),
        ("lockstep_prefix_cache_hit_tokens_total", ""),
        ("lockstep_state_audit_total", 'result="ok"'),
        ("lockstep_state_commits_total", 'outcome="full"'),
        ("lockstep_state_commits_total", 'outcome="partial"'),
        ("lockstep_state_commits_total", 'outcome="bonus_only"'),
        ("lockstep_scheduler_steps_total", 'kind="mixed"'),
        ("lockstep_state_commit_rows_total", 'kind="decode"'),
    ):
        assert total(observed, name, part) > 0, (name, part)


def test_the_server_stood_it(observed: Observed) -> None:
    for name, part in (
        ("lockstep_requests_total", 'finish_reason="error"'),
        ("lockstep_engine_restarts_total", ""),
        ("lockstep_state_commit_missing_total", ""),
        ("lockstep_state_audit_total", 'result="mismatch"'),
        ("lockstep_non_finite_rows_total", ""),
        ("lockstep_state_aborted_steps_total", ""),
        ("lockstep_requests_stuck_total", ""),
        ("lockstep_spec_draft_failures_total", ""),
        ("lockstep_requests_running", ""),
        ("lockstep_requests_waiting", ""),
        ("lockstep_state_slots", 'state="used"'),
        ("lockstep_kv_blocks", 'state="used"'),
    ):
        assert total(observed, name, part) == 0, (name, part)
    lowest = observed.ask("min_over_time(lockstep_engine_up[$__range])", instant=True)
    assert [points for _, points in lowest.series] == [[(pytest.approx(observed.end), 1.0)]]


def test_promtool_likes_the_page(observed: Observed) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=observed.page, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_what_is_exported_is_what_the_linter_believes(observed: Observed) -> None:
    """Names, types and labels: the static tests are worth what this says."""
    names = observed.prometheus.get("label/__name__/values", **{"match[]": '{__name__=~"(lockstep|process)_.+"}'})
    found = {known[0].name for name in names if (known := resolve(name)) is not None}
    assert {name for name in names if resolve(name) is None} == set()
    assert found == set(FAMILIES)
    metadata = observed.prometheus.get("metadata")
    for name, family in FAMILIES.items():
        (entry,) = metadata[name]
        assert entry["type"] == family.kind, name
        suffix = "_bucket" if family.kind == "histogram" else ""
        for series in observed.prometheus.get("series", **{"match[]": name + suffix}):
            labels = set(series) - {"__name__", *TARGET_LABELS} - ({"le"} if suffix else set())
            unsaid = {label for label in family.labels if label == "revision"}  # empty outside an image, so not there
            assert labels | unsaid == set(family.labels), name


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_panel_has_data(observed: Observed, board: object) -> None:
    ((dashboard, reasons),) = [
        (each, {(number, index): query.empty for number, index, query in known.queries()})
        for each in DASHBOARDS
        for known in BOARDS
        if known is board and each["uid"] == known.uid
    ]
    instant = {
        (panel["id"], target["refId"]): target["instant"]
        for panel in expressions.panels(dashboard)
        for target in panel.get("targets", [])
    }
    faults = {}
    for each in expressions.of_panels(dashboard):
        at_once = instant[each.panel, chr(ord("A") + each.index)]
        answer = observed.ask(each.text, instant=at_once)
        faults[each.where] = fault(answer, reasons[each.panel, each.index])
        for labels, _ in answer.series:
            assert legend_labels(each.legend) <= set(labels), f"{each.where}: the legend shows what {labels} lacks"
    assert {where: why for where, why in faults.items() if why} == {}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: str(dashboard["uid"]))
def test_annotations_and_variables_work(observed: Observed, dashboard: dict[str, object]) -> None:
    for each in expressions.of_annotations(dashboard):
        assert not fault(observed.ask(each.text), "there may be no such event")
    for selector, label in expressions.of_variables(dashboard):
        text = selector.text
        for variable, value in observed.variables.items():
            text = text.replace(variable, value)
        assert observed.prometheus.get(f"label/{label}/values", **{"match[]": text}), selector.where


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_watches_something(observed: Observed, alert: object) -> None:
    """The whole answers without error; what it compares has data, though the comparison may not hold."""
    (mine,) = [each for each in ALERTS if each is alert]
    assert not fault(observed.ask(mine.expr, instant=True), "nothing is wrong")
    for operand in unfiltered(mine.expr):
        assert not fault(observed.ask(operand, instant=True), mine.empty), operand


def test_nothing_is_wrong_while_all_is_well(observed: Observed) -> None:
    """The load overloads the server on purpose, and breaks nothing."""
    for alert in GROUPS["lockstep-correctness"]:
        if alert.wait == "0m":
            assert not observed.ask(alert.expr, instant=True).series, alert.name
    firing = observed.prometheus.instant('ALERTS{alertstate="firing",severity="critical"}', observed.end)
    assert {labels["alertname"] for labels, _ in firing.series} <= {"LockstepAvailabilityBudgetBurnsFast"}


def test_prometheus_evaluates_every_rule(observed: Observed) -> None:
    rules = [rule for group in observed.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == sum(len(group["rules"]) for group in expressions.rule_groups(ROOT))
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    for rule in rules:
        if rule["type"] == "recording":
            selector = f'{rule["name"]}{{slo="{rule["labels"]["slo"]}"}}'
            assert observed.prometheus.instant(selector, observed.end).has_data, selector


def test_autoscalers_get_a_number(observed: Observed) -> None:
    found = list(expressions.autoscaling(ROOT))
    for each in found:
        assert not fault(observed.ask(each.text, instant=True), ""), each.where
    assert bool(found) == (ROOT / "deploy/kustomize/components/keda").is_dir()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: str(dashboard["uid"]))
def test_a_dashboard_can_be_drawn(observed: Observed, dashboard: dict[str, object], tmp_path: Path) -> None:
    """`make observe` writes the pictures of docs/img; else they go nowhere."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[observe]')")
    from tests.observability.sheet import Sheet

    def ask(expression: str, instant: bool) -> Answer:
        return observed.ask(expression, instant=instant, step=1.0)

    folder = ROOT / os.environ["PICTURES"] if "PICTURES" in os.environ else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{dashboard['uid']}.png"
    Sheet(dashboard, ask).draw(path)
    assert 10_000 < path.stat().st_size < LARGEST
