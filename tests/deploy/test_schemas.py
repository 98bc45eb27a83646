"""Every object against the schemas of Kubernetes 1.31 to 1.37, and custom resources against theirs."""

from __future__ import annotations

import copy
import functools
import importlib
import json
from types import ModuleType

import pytest

from tests.deploy.custom_resources import KINDS, problems, schema_of
from tests.deploy.objects import OVERLAYS, Object, chart, hooks, kustomize, module, named, pods, weights_fill

VERSIONS = tuple(f"1.{minor}.0" for minor in range(31, 38))


@functools.cache
def everything() -> tuple[str, ...]:
    """All different objects of all overlays and values files, as JSON."""
    documents = list(weights_fill())
    for overlay in OVERLAYS:
        documents += [*kustomize(overlay), *chart(overlay), *hooks(overlay)]
    for pod in list(pods(named(documents, "LeaderWorkerSet"))):
        documents.append(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": pod.labels}, "spec": pod.spec}
        )
    return tuple(sorted({json.dumps(without_what_differs(document), sort_keys=True) for document in documents}))


def without_what_differs(document: Object) -> Object:
    """Without what no schema judges and what would make every object different: dashboards' text."""
    copied = copy.deepcopy(document)
    if document["kind"] == "ConfigMap":
        copied["data"] = dict.fromkeys(document["data"], "...")
    return copied


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The validator, reading each file once: it reads a version's definitions again for every object."""
    loaded = module("kubernetes_validate")
    utils = importlib.import_module("kubernetes_validate.utils")
    monkeypatch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
    return loaded


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(version: str, validate: ModuleType) -> None:
    checked = 0
    for text in everything():
        document = json.loads(text)
        if schema_of(document["kind"]) is None:
            validate.validate(document, version, strict=True)
            checked += 1
    assert checked > 20


def test_every_custom_resource_is_right() -> None:
    found = [document for document in map(json.loads, everything()) if schema_of(document["kind"]) is not None]
    assert {document["kind"].lower() for document in found} == set(KINDS)
    for document in found:
        assert problems(document) == [], document["metadata"]["name"]


def changed(kind: str, *path: object, value: object) -> Object:
    """One object of a kind, with one value set; None takes it out."""
    document: Object = next(each for each in map(json.loads, everything()) if each["kind"] == kind)
    place = document
    for step in path[:-1]:
        place = place[step]  # type: ignore[index]
    if value is None:
        del place[path[-1]]  # type: ignore[arg-type]
    else:
        place[path[-1]] = value  # type: ignore[index]
    return document


# what is wrong -> the kind, the path of the field, and its bad value (None: without the field)
WRONG: dict[str, tuple[str, tuple[object, ...], object]] = {
    "a picker without a port": ("InferencePool", ("endpointPickerRef", "port"), None),
    "a port twice": ("InferencePool", ("targetPorts",), [{"number": 1}, {"number": 1}]),
    "no port": ("InferencePool", ("targetPorts",), []),
    "a field of old": ("InferencePool", ("extensionRef",), {"name": "x"}),
    "a path that is none": ("HTTPRoute", ("rules", 0, "matches", 0, "path", "value"), "v1"),
    "a path that climbs": ("HTTPRoute", ("rules", 0, "matches", 0, "path", "value"), "/v1/../x"),
    "a Service without a port": ("HTTPRoute", ("rules", 0, "backendRefs"), [{"name": "x"}]),
    "a backend slower than its request": (
        "HTTPRoute",
        ("rules", 0, "timeouts"),
        {"request": "1s", "backendRequest": "2s"},
    ),
    "a parent twice": ("HTTPRoute", ("parentRefs",), [{"name": "x"}, {"name": "x"}]),
    "a number as text": ("ScaledObject", ("maxReplicaCount",), "4"),
    "more than the most": ("ScaledObject", ("minReplicaCount",), 5),
    "a fallback for no average": ("ScaledObject", ("triggers", 0, "metricType"), "Value"),
    "no query": ("ScaledObject", ("triggers", 0, "metadata", "query"), None),
    "no duration": ("PodMonitor", ("podMetricsEndpoints", 0, "interval"), "often"),
    "a rule that is both": ("PrometheusRule", ("groups", 0, "rules", 0, "alert"), "X"),
    "a group twice": ("PrometheusRule", ("groups",), [{"name": "x"}, {"name": "x"}]),
    "a group of nobody": ("LeaderWorkerSet", ("leaderWorkerTemplate", "size"), 0),
    "a rollout that cannot": (
        "LeaderWorkerSet",
        ("rolloutStrategy", "rollingUpdateConfiguration"),
        {"maxSurge": 0, "maxUnavailable": 0},
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_what_a_cluster_would_refuse_is_refused(case: tuple[str, tuple[object, ...], object]) -> None:
    kind, path, value = case
    assert problems(changed(kind, "spec", *path, value=value)) != []


def test_a_typing_error_is_refused(validate: ModuleType) -> None:
    document = changed("Deployment", "spec", "template", "spec", "terminationGracePeriod", value=3)
    with pytest.raises(validate.ValidationError):
        validate.validate(document, VERSIONS[0], strict=True)
