"""The chart and the overlays describe the same objects, field by field."""

from __future__ import annotations

import copy
import json
import re

import pytest

from server.settings import Settings
from tests.deploy.objects import (
    CHART,
    OVERLAYS,
    Object,
    canonical,
    chart,
    hooks,
    kustomize,
    module,
    named,
    pods,
    render,
    values_of,
)

# What Helm adds to say that it was Helm.
HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")


def comparable(documents: list[Object]) -> dict[tuple[str, str], Object]:
    found: dict[tuple[str, str], Object] = {}
    for document in documents:
        copied = copy.deepcopy(document)
        for label in HELM_LABELS:
            copied["metadata"].get("labels", {}).pop(label, None)
        found[copied["kind"], copied["metadata"]["name"]] = canonical(copied)
    return found


def test_every_overlay_has_its_values_and_the_other_way_round() -> None:
    assert tuple(sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())) == OVERLAYS


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_helm_says_what_kustomize_says(overlay: str) -> None:
    from_helm, from_kustomize = comparable(chart(overlay)), comparable(kustomize(overlay))
    assert sorted(from_helm) == sorted(from_kustomize)
    for key, document in from_kustomize.items():
        assert json.dumps(from_helm[key], indent=1) == json.dumps(document, indent=1), key


def test_the_chart_lints() -> None:
    report = module("helm_python").lint(CHART, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_another_release_is_another_set_of_objects(overlay: str) -> None:
    """Two releases in one namespace share nothing, and nothing but labels and images says `lockstep` alone."""
    blue = render(values_of(overlay), release="blue", namespace="team")
    for document in blue:
        assert document["metadata"]["name"].startswith("blue-lockstep"), document["metadata"]
        assert document["metadata"]["namespace"] == "team"
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "blue"
    text = json.dumps([each for each in blue if each["kind"] not in ("PrometheusRule", "ConfigMap")])
    assert 'namespace="lockstep"' not in text.replace("\\", "")
    assert not re.search(r'"(serviceAccountName|instance|claimNamespace)": "lockstep"', text)
    for scaled in named(blue, "ScaledObject") + named(blue, "HorizontalPodAutoscaler"):
        assert scaled["spec"]["scaleTargetRef"]["name"] == "blue-lockstep"
    for pool in named(blue, "InferencePool"):
        assert pool["spec"]["endpointPickerRef"]["name"] == "blue-lockstep-epp"


def test_the_chart_s_own_test_asks_its_service() -> None:
    (pod,) = hooks("cpu")
    (container,) = pod["spec"]["containers"]
    compile(container["args"][0], "completion.py", "exec")
    assert container["args"][0].strip() == (CHART / "files" / "completion.py").read_text().strip()
    url = next(entry["value"] for entry in container["env"] if entry["name"] == "URL")
    (service,) = named(chart("cpu"), "Service")
    assert url == f"http://{service['metadata']['name']}.lockstep.svc:{service['spec']['ports'][0]['port']}"


REFUSED: dict[str, Object] = {
    "unknown key": {"replica": 2},
    "unknown setting": {"settings": {"drain_timeot": 3}},
    "setting out of range": {"settings": {"max_num_seqs": 0}},
    "setting of another type": {"settings": {"threads": "two"}},
    "setting of the chart": {"settings": {"port": 80}},
    "unknown source": {"weights": {"source": "hub"}},
    "no url": {"weights": {"source": "download"}},
    "no image": {"weights": {"source": "image"}},
    "nothing may move": {"rollout": {"maxSurge": 0, "maxUnavailable": 0}},
    "unknown autoscaler": {"autoscaling": {"kind": "vpa"}},
    "a group that is scaled": {"autoscaling": {"kind": "hpa"}, "multihost": {"enabled": True}},
    "no quantity": {"resources": {"requests": {"cpu": "two"}}},
    "less patience than the program": {"settings": {"engine_start_timeout": 1900}},
}


@pytest.mark.parametrize("values", REFUSED.values(), ids=REFUSED)
def test_bad_values_are_refused(values: Object) -> None:
    helm = module("helm_python")
    with pytest.raises(helm.HelmError):
        with helm.Chart.load(CHART) as loaded:
            loaded.validate_schema(values)
        render(values)


@pytest.mark.parametrize("value", [0, 1, 0.5, 300, 86400])
def test_numbers_arrive_as_they_were_meant(value: float) -> None:
    (pod,) = pods([each for each in render({"settings": {"drain_timeout": value}}) if each["kind"] == "Deployment"])
    text = pod.environment()["LOCKSTEP_DRAIN_TIMEOUT"]
    assert Settings.model_validate({"drain_timeout": text}).drain_timeout == value
    assert "e" not in text
    assert pod.spec["terminationGracePeriodSeconds"] > 15 + value + 15


def test_a_large_number_has_no_exponent() -> None:
    (pod,) = pods([each for each in render({"settings": {"max_body_bytes": 2**30}}) if each["kind"] == "Deployment"])
    assert pod.environment()["LOCKSTEP_MAX_BODY_BYTES"] == str(2**30)
