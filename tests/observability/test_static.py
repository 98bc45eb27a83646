"""Dashboards, rules and autoscaling queries against the metrics table, without a Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from grafana_foundation_sdk.models.heatmap import Options as HeatmapOptions

from deploy.observability import __main__ as program
from deploy.observability import expressions, rules
from deploy.observability.alerts_slo import recordings
from deploy.observability.board import COLUMNS
from deploy.observability.expressions import Expression
from deploy.observability.families import FAMILIES, resolve
from deploy.observability.lint import Labels, Linter, legend_labels, substitute, unfiltered
from deploy.observability.panels import HISTOGRAM_PARTS, METRIC, NO_TRAFFIC
from deploy.observability.promql import BOARD, Scope, UnknownMetricError, share
from deploy.observability.slo import GOOD_ENDS, OBJECTIVES, OWN_FAULT
from runtime.api import EngineStats
from server.meter import Meter
from server.metrics import FINISH_REASONS, REJECTIONS
from server.settings import Settings, flag_of

ROOT = Path(__file__).parents[2]
DASHBOARDS = expressions.dashboards(ROOT)
GROUPS = expressions.rule_groups(ROOT)
ALERTS = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]

TESTS = yaml.load((ROOT / "deploy/prometheus/rules_test.yml").read_text(), yaml.CSafeLoader)["tests"]

# Keys of an annotation that belong to the data source, so that Grafana's own types do not list them.
OF_PROMETHEUS = {"titleFormat"}
# Families on no panel and in no rule, and why.
UNSHOWN = {
    "process_virtual_memory_bytes": "reserved address space says nothing about memory in use",
}


def by_uid(dashboard: dict[str, Any]) -> str:
    return str(dashboard["uid"])


def by_name(alert: dict[str, Any]) -> str:
    return str(alert["alert"])


def recorded() -> dict[str, Labels]:
    """The labels of recorded series, which alerts may use."""
    found: dict[str, Labels] = {}
    for group in GROUPS:
        for rule in group["rules"]:
            if "record" in rule:
                labels = Linter().check(rule["expr"]) or frozenset()
                found[rule["record"]] = labels | set(rule.get("labels", {}))
    return found


RECORDED = recorded()


def checked(text: str) -> tuple[Linter, Labels | None]:
    linter = Linter(RECORDED)
    return linter, linter.check(substitute(text))


def everything() -> list[Expression]:
    found: list[Expression] = []
    for dashboard in DASHBOARDS:
        found += expressions.of_panels(dashboard)
        found += expressions.of_annotations(dashboard)
        found += [expression for expression, _ in expressions.of_variables(dashboard)]
    for group in GROUPS:
        found += [Expression(rule.get("alert") or rule["record"], rule["expr"]) for rule in group["rules"]]
    return [*found, *expressions.autoscaling(ROOT)]


EVERYTHING = everything()

# --- generated files ------------------------------------------------------------------------------------------------


def test_files_say_what_the_program_says() -> None:
    assert program.drifted(ROOT) == [], "run `make dashboards`"


def test_drift_is_noticed_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--check"], tmp_path) == 1
    assert program.main([], tmp_path) == 0
    assert program.main(["--check"], tmp_path) == 0
    (tmp_path / "deploy/prometheus/rules.yml").write_text("groups: []\n")
    (tmp_path / "deploy/grafana/dashboards/of-nobody.json").write_text("{}\n")
    assert program.main(["--check"], tmp_path) == 1
    assert program.drifted(tmp_path) == ["deploy/prometheus/rules.yml", "deploy/grafana/dashboards/of-nobody.json"]
    assert "of-nobody.json" in capsys.readouterr().err


# --- expressions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expression", EVERYTHING, ids=lambda each: each.where)
def test_an_expression_names_what_the_server_exports(expression: Expression) -> None:
    linter, labels = checked(expression.text)
    assert not linter.problems
    shown = legend_labels(expression.legend)
    assert labels is None or shown <= labels, f"the legend shows {shown - labels}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lockstep_requests_runing", "nothing exports"),
        ("sum(rate(lockstep_requests_total[5m])", "does not parse"),
        ("sum(lockstep_requests_total)", "only its growth"),
        ("rate(lockstep_requests_running[5m])", "which is a gauge"),
        ("changes(lockstep_requests_total[5m])", "only its growth"),
        ("rate(lockstep_time_to_first_token_seconds[5m])", "is a histogram"),
        ("lockstep_time_to_first_token_seconds_bucket", "only its growth"),
        ("sum by (reason) (rate(lockstep_requests_total[5m]))", "by reason, which is not there"),
        ('rate(lockstep_requests_total{reason="stop"}[5m])', "has no label reason"),
        ('rate(lockstep_requests_total{finish_reason="stopped"}[5m])', "has no finish_reason='stopped'"),
        ('rate(lockstep_requests_total{finish_reason=~"stop|none"}[5m])', "has no finish_reason='none'"),
        ('sum(rate(lockstep_time_to_first_token_seconds_bucket{le="2"}[5m]))', "has no le='2'"),
        ("histogram_quantile(0.9, sum(rate(lockstep_time_to_first_token_seconds_bucket[5m])))", "without le"),
        ("sum(rate(lockstep_generation_tokens_total[5m])) / sum(lockstep_engine_up)", "may be 0"),
        ("lockstep_requests_running * lockstep_requests_waiting", "never match"),
        ("lockstep_requests_running > 0 and lockstep_requests_waiting > 0", "never match"),
        ("lockstep_requests_running and on (reason) lockstep_requests_waiting", "which one side does not have"),
        ('ALERTS{reason="x"}', "has no label reason"),
        ('lockstep:slo_bad:ratio_rate1h{pod="a"}', "has no label pod"),
        ("lockstep:slo_bad:ratio_rate7h", "nothing exports"),
        ("sum(1)", "does not parse"),
        ("sum(scalar(lockstep_engine_up))", "does not parse"),
    ],
)
def test_the_linter_sees(text: str, problem: str) -> None:
    linter, _ = checked(text)
    assert any(problem in each for each in linter.problems), linter.problems


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("sum by (pod) (rate(lockstep_requests_total[5m]))", {"pod"}),
        ("sum without (pod, job) (lockstep_engine_up)", {"instance", "namespace", "model_name"}),
        ("time() - lockstep_scheduler_last_step_timestamp_seconds > 60 and lockstep_requests_running > 0", None),
        ("process_open_fds / (process_max_fds > 0) and on (job, instance) lockstep_engine_up", None),
        ("sum(lockstep_engine_up) / 2", set()),
        ("topk(3, lockstep_engine_up)", None),
    ],
)
def test_the_linter_lets_pass(text: str, labels: set[str] | None) -> None:
    linter, found = checked(text)
    assert not linter.problems
    if labels is not None:
        assert found == labels


def test_unknown_variables_are_refused() -> None:
    with pytest.raises(KeyError):
        substitute('lockstep_engine_up{pod=~"$pods"}')


def test_operands_of_an_alert() -> None:
    text = "a > 1 and ignoring(x) b == 0 unless (c / (d > 0) < 2 or e)"
    assert list(unfiltered(text)) == ["a", "b", "c / (d > 0)", "e"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: BOARD.rate("requests_running"),
        lambda: BOARD.rate("time_to_first_token_seconds"),
        lambda: BOARD.gauge("requests_total"),
        lambda: BOARD.quantile(0.5, "requests_total"),
        lambda: BOARD.rate("request_total"),
    ],
)
def test_what_the_table_does_not_have_cannot_be_spelt(wrong: Any) -> None:
    with pytest.raises(UnknownMetricError):
        wrong()


def test_spelling() -> None:
    scope = Scope('pod="a"', "5m")
    assert scope.rate("requests_total", "pod") == 'sum by (pod) (rate(lockstep_requests_total{pod="a"}[5m]))'
    assert Scope().gauge("requests_running") == "sum(lockstep_requests_running)"
    assert scope.over("1h").series("process_open_fds") == 'process_open_fds{pod="a"}'
    assert share("a", "b") == "a / (b > 0)"
    assert 'model_name=~"$model_name"' not in BOARD.series("process_open_fds")


# --- the table ------------------------------------------------------------------------------------------------------


def test_families_are_those_of_the_page() -> None:
    meter = Meter("m", "mtp", EngineStats)
    page = {family.name: family.type for family in meter.registry.collect()}
    here = {name.removesuffix("_total"): family.kind for name, family in FAMILIES.items()}
    assert {name: kind for name, kind in page.items() if not name.startswith("process_")} == {
        name: kind for name, kind in here.items() if not name.startswith("process_")
    }
    assert {name for name in page if name.startswith("process_")} <= set(here)


def test_every_family_is_shown_somewhere() -> None:
    used: set[str] = set()
    for expression in EVERYTHING:
        used |= checked(expression.text)[0].used
    assert set(FAMILIES) - used == set(UNSHOWN)
    assert all(UNSHOWN.values())


def test_every_refusal_is_ours_or_the_clients() -> None:
    """A new reason counts against the objective until somebody says that it is the client's own fault."""
    assert set(OWN_FAULT) <= set(REJECTIONS)
    assert set(REJECTIONS) - set(OWN_FAULT) <= {"queue_full", "queue_tokens", "deadline", "draining", "unavailable"}


def test_every_end_is_good_or_not() -> None:
    """A new reason counts as bad until somebody says that it is good."""
    assert set(GOOD_ENDS) <= set(FINISH_REASONS)
    assert set(FINISH_REASONS) - set(GOOD_ENDS) <= {"abort", "deadline", "error"}


# --- dashboards -----------------------------------------------------------------------------------------------------


def test_there_are_four_and_none_has_anothers_uid() -> None:
    assert len(DASHBOARDS) == 4
    assert len({dashboard["uid"] for dashboard in DASHBOARDS}) == 4


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_uid)
def test_grafanas_own_types_know_every_key(dashboard: dict[str, Any]) -> None:
    """Read into the vendor's classes and written again: a key they do not have would be gone."""
    again = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(dashboard)))
    assert not [path for path in lost(dashboard, again, "") if path.rpartition(".")[2] not in OF_PROMETHEUS]


def lost(before: Any, after: Any, path: str) -> list[str]:
    """Keys that did not survive. Panels of folded rows are of the same type, and are compared like the others."""
    if isinstance(before, dict):
        if not isinstance(after, dict):
            return [path]
        gone = [f"{path}.{key}" for key in before if key not in after]
        kept = [key for key in before if key in after]
        return gone + [each for key in kept for each in lost(before[key], after[key], f"{path}.{key}")]
    if isinstance(before, list):
        if not isinstance(after, list) or len(before) != len(after):
            return [path]
        return [each for i, pair in enumerate(zip(before, after, strict=True)) for each in lost(*pair, f"{path}[{i}]")]
    return [] if before == after else [f"{path}: {before!r} became {after!r}"]


def test_heatmap_options_are_grafanas() -> None:
    heatmaps = [
        panel for dashboard in DASHBOARDS for panel in expressions.panels(dashboard) if panel["type"] == "heatmap"
    ]
    assert heatmaps
    for panel in heatmaps:
        again = json.loads(JSONEncoder(sort_keys=True).encode(HeatmapOptions.from_json(panel["options"])))
        assert not lost(panel["options"], again, "options")


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_uid)
def test_ids_are_unique_and_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = list(expressions.panels(dashboard))
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= COLUMNS
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_uid)
def test_no_datasource_is_wired_in(dashboard: dict[str, Any]) -> None:
    def uids(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["datasource"]["uid"]] if isinstance(node.get("datasource"), dict) else []
            return own + [uid for value in node.values() for uid in uids(value)]
        return [uid for value in node for uid in uids(value)] if isinstance(node, list) else []

    assert set(uids(dashboard)) == {"${datasource}"}
    assert '"datasource": null' not in str(dashboard)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_uid)
def test_variables_narrow_each_other(dashboard: dict[str, Any]) -> None:
    variables = dashboard["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "job", "namespace", "model_name", "pod"]
    for number, (expression, label) in enumerate(expressions.of_variables(dashboard)):
        earlier = [variable["name"] for variable in variables[1 : number + 1]]
        assert all(f'{name}=~"${name}"' in expression.text for name in earlier)
        assert label in (checked(expression.text)[1] or set())


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_uid)
def test_every_panel_can_be_read_alone(dashboard: dict[str, Any]) -> None:
    titles = [panel["title"] for panel in expressions.panels(dashboard) if panel["type"] == "row"]
    assert len(set(titles)) == len(titles)
    for panel in expressions.panels(dashboard):
        if panel["type"] == "row":
            continue
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        assert defaults["noValue"] == NO_TRAFFIC
        special = [each["options"] for each in defaults["mappings"] if each["type"] == "special"]
        assert [(each["match"], each["result"]["text"]) for each in special] == [("null+nan", NO_TRAFFIC)]
        why, _, metrics = panel["description"].partition("\n\nMetrics: ")
        assert why.strip().endswith(".")
        for target in panel["targets"]:
            for name in METRIC.findall(target["expr"]):
                assert f"`{HISTOGRAM_PARTS.sub('', name)}`" in metrics
            assert target["datasource"]["uid"] == "${datasource}"
            # a line without a name of its own needs one
            if panel["type"] == "timeseries":
                assert target["legendFormat"] != "__auto"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_uid)
def test_units_are_those_of_the_metrics(dashboard: dict[str, Any]) -> None:
    """A quantile or mean of seconds is shown in seconds, a usage ratio in per cent, bytes in bytes."""
    for panel in expressions.panels(dashboard):
        for target in panel.get("targets", []):
            text, unit = target["expr"], panel["fieldConfig"]["defaults"]["unit"]
            if panel["type"] == "table":
                continue
            if found := re.match(r"histogram_quantile\([^,]+, sum by \([^)]*\) \(rate\((\w+)_bucket", text):
                assert (unit == "s") == found.group(1).endswith("_seconds"), panel["title"]
            if re.match(r"(?:sum|max)(?: by \([^)]*\) )?\(lockstep_\w+_bytes\b", text):
                assert unit == "bytes", panel["title"]
            if re.match(r"(?:max|avg)(?: by \([^)]*\) )?\(?lockstep_\w+_usage_ratio\b", text):
                assert unit == "percentunit", panel["title"]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=by_uid)
def test_tables_show_columns_that_are_there(dashboard: dict[str, Any]) -> None:
    for panel in expressions.panels(dashboard):
        if panel["type"] != "table":
            continue
        names = set()
        for target in panel["targets"]:
            names |= {f"Value #{target['refId']}", *(checked(target["expr"])[1] or ())}
        renamed = panel["transformations"][-1]["options"]["renameByName"]
        assert set(renamed) <= names
        titles = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
        assert titles <= set(renamed.values())


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS, ids=by_name)
def test_an_alert_says_what_it_is_about(alert: dict[str, Any]) -> None:
    labels = checked(alert["expr"])[1]
    assert labels is not None
    words = " ".join(alert["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", words)) <= labels
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"]["dashboard"].removeprefix("/d/") in {dashboard["uid"] for dashboard in DASHBOARDS}
    assert "namespace" in labels, "whoever is woken must know where"


@pytest.mark.parametrize("alert", ALERTS, ids=by_name)
def test_an_alert_has_a_case_that_fires_and_one_that_does_not(alert: dict[str, Any]) -> None:
    mine = [
        check["exp_alerts"]
        for test in TESTS
        for check in test["alert_rule_test"]
        if check["alertname"] == alert["alert"]
    ]
    assert sorted(map(bool, mine)) == [False, True]


@pytest.mark.parametrize("alert", ALERTS, ids=by_name)
def test_an_alert_has_a_paragraph_in_the_runbook(alert: dict[str, Any]) -> None:
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    paragraphs = re.split(r"^### ", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)
    mine = [text for text in paragraphs if text.startswith(alert["alert"] + "\n")]
    assert len(mine) == 1
    assert anchor == alert["alert"].lower()
    for question in ("**Means**", "**Look**", "**Do**"):
        assert question in mine[0]


def test_the_runbook_sends_nobody_to_a_panel_that_is_not_there() -> None:
    text = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    titles = {panel["title"] for dashboard in DASHBOARDS for panel in expressions.panels(dashboard)}
    named = {" ".join(name.split()) for name in re.findall(r'"([^"]+)"', text)} - {"by replica"}
    assert len(named) > 20
    assert named <= titles


def test_settings_that_are_named_exist() -> None:
    """A flag in the runbook or on a panel that the server does not have helps nobody at night."""
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("runbook.md", "observability.md")]
    texts += [panel.get("description", "") for dashboard in DASHBOARDS for panel in expressions.panels(dashboard)]
    named = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    of_kubectl = {"--grace-period", "--force"}
    assert len(named) > 10
    assert named - of_kubectl <= {flag_of(name) for name in Settings.model_fields}


def test_cases_feed_series_that_the_server_exports() -> None:
    """Else an alert could be tested on what never comes."""
    for name in {series["series"] for test in TESTS for series in test["input_series"]}:
        base, _, _ = name.partition("{")
        family = resolve(base)
        counts = family is not None and (family[0].kind == "counter" or family[1])
        linter, _ = checked(f"rate({name}[5m])" if counts else name)
        assert not linter.problems


def test_the_runbook_has_no_paragraph_for_an_alert_that_is_gone() -> None:
    text = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (Lockstep\w+)$", text, re.MULTILINE) == [alert["alert"] for alert in ALERTS]


def test_alerts_and_records_have_names_of_their_own() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)
    records = [(rule["record"], rule["labels"]["slo"]) for rule in recordings()]
    assert len(set(records)) == len(records)
    assert {slo for _, slo in records} == {objective.name for objective in OBJECTIVES}


def test_what_must_stay_zero_has_an_alert() -> None:
    """Every counter that docs/metrics.md says must not move."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    section = page.partition("## What must stay 0")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `(\w+)", section, re.MULTILINE)
    assert len(names) >= 5
    watched = {name for alert in ALERTS for name in METRIC.findall(alert["expr"])}
    assert set(names) <= watched


def test_every_alert_is_committed() -> None:
    assert [alert["alert"] for alert in ALERTS] == [alert.name for alert in rules.ALERTS]


# --- autoscaling ----------------------------------------------------------------------------------------------------


def test_what_scales_on_a_custom_metric_finds_it_in_the_adapter() -> None:
    assert expressions.custom_metrics(ROOT) <= set(expressions.adapter(ROOT))
    for name in expressions.custom_metrics(ROOT):
        assert resolve(name) is not None
