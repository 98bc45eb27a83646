"""Files that follow from others say what those say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.manifests import OF_THE_CHART, dashboard_name, generated, settings_schema
from server.fetch import digest_of, parse_sums
from server.settings import Settings
from tests.deploy.objects import CHART, DEPLOY, ROOT, load

COMMAND = "`make docs` writes it anew"


@pytest.mark.parametrize("path", generated(), ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generated()[path], f"{path.relative_to(ROOT)}: {COMMAND}"


def test_the_rules_are_the_rules() -> None:
    (rule,) = load(DEPLOY / "kustomize" / "components" / "monitoring" / "prometheusrule.yaml")
    (rules,) = load(DEPLOY / "prometheus" / "rules.yml")
    assert rule["spec"] == rules
    assert len(rules["groups"]) > 1


def test_every_dashboard_gets_a_config_map() -> None:
    (kustomization,) = load(DEPLOY / "grafana" / "dashboards" / "kustomization.yaml")
    files = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
    assert len(files) == 4
    assert [entry["files"] for entry in kustomization["configMapGenerator"]] == [[path.name] for path in files]
    assert len({dashboard_name(path) for path in files}) == 4


def test_the_chart_links_to_the_one_copy() -> None:
    assert (CHART / "files" / "rules.yml").resolve() == DEPLOY / "prometheus" / "rules.yml"
    assert (CHART / "files" / "dashboards").resolve() == DEPLOY / "grafana" / "dashboards"


def test_the_chart_knows_every_setting_but_its_own() -> None:
    assert set(settings_schema()["properties"]) | OF_THE_CHART == set(Settings.model_fields)
    assert set(Settings.model_fields) >= OF_THE_CHART
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["settings"] == settings_schema()


def test_the_example_s_checksums_are_those_of_the_embedded_model() -> None:
    """So that the example can be tried, with any web server that has these files."""
    (document,) = load(DEPLOY / "kustomize" / "sums" / "sums.yaml")
    sums = parse_sums(document["data"]["SHA256SUMS"])
    model = ROOT / "runtime" / "assets" / "model"
    assert {str(entry.path) for entry in sums} == {
        path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()
    }
    for entry in sums:
        assert digest_of(model / entry.path) == entry.digest, f"{entry.path}: run sha256sum anew"
